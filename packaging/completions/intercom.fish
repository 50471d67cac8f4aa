# SPDX-License-Identifier: Apache-2.0
# Completion of `intercom` and `orchestrate` for fish. The commands know what may come next; files fish knows.

function __agent_intercom_words
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l found ($words[1] _complete $words[2..-1] "$current" 2>/dev/null)
    set -l option (string match -r -- '^--[^=]*=' "$current")
    set -l path (string replace -r -- '^--[^=]*=' '' "$current")
    switch "$found[1]"
        case :files
            printf '%s\n' "$option"(__fish_complete_path "$path")
        case :directories
            printf '%s\n' "$option"(__fish_complete_directories "$path" '')
        case '*'
            printf '%s\n' $found
    end
end

complete -c intercom -f -a '(__agent_intercom_words)'
complete -c orchestrate -f -a '(__agent_intercom_words)'
