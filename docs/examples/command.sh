#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# command.sh AGENT…: the program of a role with the harness `command`. AGENT reads its assignment on standard input, and
# the report is what it prints; a reviewer that approves says so in a line APPROVED. Where AGENT fails there is no report.
set -eu
orchestrate progress --phase thinking >&2 || :
cd "${AGENT_INTERCOM_CHECKOUT:-.}" # A role that may not write has a copy to work in.
said=$("$@" <"$AGENT_INTERCOM_ASSIGNMENT_FILE")
[ "$AGENT_INTERCOM_ASSIGNMENT_KIND" = plan ] && most=1000 || most=2000
summary=$(printf %s "$said" | head -c "$most" | iconv -c -f UTF-8 -t UTF-8)
if [ "$AGENT_INTERCOM_ROLE" != reviewer ]; then
    exec orchestrate report --summary "$summary"
elif printf '%s\n' "$said" | grep -qx APPROVED; then
    exec orchestrate report --summary "$summary" --verdict approved
fi
exec orchestrate report --summary "$summary" --verdict changes_requested
