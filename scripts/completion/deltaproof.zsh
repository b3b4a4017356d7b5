#compdef deltaproof
# zsh completion of deltaproof: commands, options and cases are asked of the program itself.
_deltaproof() {
    local program=${words[1]} command=${words[2]}
    local -a found
    if (( CURRENT == 2 )); then
        found=(${(f)"$($program --help 2>/dev/null | sed -n 's/^  \([a-z]\{2,\}\) *\(.*\)/\1:\2/p')"})
        _describe command found
    elif [[ ${words[CURRENT]} == -* ]]; then
        found=(${(f)"$($program $command --help 2>/dev/null | sed -n 's/^ *\(-., \)\?\(--[a-z][a-z0-9-]*=\?\).*/\2/p')"})
        compadd -S '' -- $found
    else
        if $program $command --help 2>/dev/null | head -n 1 | grep -q CASE; then
            found=(${(f)"$($program list 2>/dev/null | cut -d ' ' -f 1)"})
            compadd -- $found
        fi
        _files
    fi
}
_deltaproof "$@"
