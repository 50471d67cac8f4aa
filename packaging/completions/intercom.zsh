#compdef intercom orchestrate
# SPDX-License-Identifier: Apache-2.0
# Completion of `intercom` and `orchestrate` for zsh. The commands know what may come next; files zsh knows.

local -a found
found=("${(@f)$(_call_program words ${(q)words[1]} _complete ${(q)words[2,CURRENT]} 2>/dev/null)}")

case $found[1] in
    '')
        return 1
        ;;
    :files)
        compset -P '--[^=]#='
        _files
        ;;
    :directories)
        compset -P '--[^=]#='
        _files -/
        ;;
    *=)
        compadd -S '' -a found
        ;;
    *)
        compadd -a found
        ;;
esac
