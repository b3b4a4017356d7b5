# fish completion of deltaproof: commands, options and cases are asked of the program itself.
function __deltaproof_commands
    deltaproof --help 2>/dev/null | string match -rg '^  ([a-z]{2,} .*)' | string replace -r '^(\S+)\s+' '$1\t'
end
function __deltaproof_options
    set -l words (commandline -opc)
    test (count $words) -ge 2; and deltaproof $words[2] --help 2>/dev/null | string match -ra -- '--[a-z][a-z0-9-]*' | sort -u
end
function __deltaproof_wants_case
    set -l words (commandline -opc)
    test (count $words) -ge 2; and deltaproof $words[2] --help 2>/dev/null | head -n 1 | string match -q '*CASE*'
end
complete -c deltaproof -n '__fish_is_first_token' -f -a '(__deltaproof_commands)'
complete -c deltaproof -n 'not __fish_is_first_token' -a '(__deltaproof_options)'
complete -c deltaproof -n __deltaproof_wants_case -a '(deltaproof list 2>/dev/null | string split -f 1 " ")'
