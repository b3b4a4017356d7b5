# bash completion of deltaproof: commands, options and cases are asked of the program itself.
_deltaproof() {
    local word=${COMP_WORDS[COMP_CWORD]} program=${COMP_WORDS[0]} words
    COMPREPLY=()
    if [ "$COMP_CWORD" = 1 ]; then
        words=$("$program" --help 2>/dev/null | sed -n 's/^  \([a-z]\{2,\}\) .*/\1/p')
    elif [[ $word == -* ]]; then
        words=$("$program" "${COMP_WORDS[1]}" --help 2>/dev/null | sed -n 's/^ *\(-., \)\?\(--[a-z][a-z0-9-]*=\?\).*/\2/p')
        compopt -o nospace 2>/dev/null
    else
        if "$program" "${COMP_WORDS[1]}" --help 2>/dev/null | head -n 1 | grep -q CASE; then
            words=$("$program" list 2>/dev/null | cut -d ' ' -f 1)
        fi
        compopt -o default 2>/dev/null
    fi
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}
complete -F _deltaproof deltaproof
