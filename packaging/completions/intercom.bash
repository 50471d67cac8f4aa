# SPDX-License-Identifier: Apache-2.0
# Completion of `intercom` and `orchestrate` for bash (>= 4.4). The commands know what may come next; files bash knows.

_agent_intercom() {
    local program=${1/#\~\//"$HOME"/} word before
    local -a words=()
    COMPREPLY=()
    # Readline ends words at = and : too, the commands do not.
    for word in "${COMP_WORDS[@]:1:COMP_CWORD}"; do
        if [[ ${#words[@]} -gt 0 && ($word == [=:]* || ${words[-1]} == *[=:]) ]]; then
            words[-1]+=$word
        else
            words+=("$word")
        fi
    done
    mapfile -t COMPREPLY < <("$program" _complete "${words[@]}" 2>/dev/null)
    # What readline does not replace.
    before=${words[-1]%"$2"}
    case ${COMPREPLY[0]-} in
        :files)
            compopt -o filenames 2>/dev/null
            mapfile -t COMPREPLY < <(compgen -f -- "$2")
            ;;
        :directories)
            compopt -o filenames 2>/dev/null
            mapfile -t COMPREPLY < <(compgen -d -- "$2")
            ;;
        *=)
            compopt -o nospace 2>/dev/null
            COMPREPLY=("${COMPREPLY[@]#"$before"}")
            ;;
        *)
            COMPREPLY=("${COMPREPLY[@]#"$before"}")
            ;;
    esac
}

complete -F _agent_intercom intercom orchestrate
