/* SPDX-License-Identifier: Apache-2.0 */
/* Starts a command with inherited listeners, as sd_listen_fds(3) has it: descriptors from 3 on, LISTEN_PID its own.
 *
 * activate NAMES FD... -- COMMAND...     NAMES goes into LISTEN_FDNAMES
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FIRST = 3, MOST = 8, ASIDE = 64 };

int main(int argc, char **argv) {
        char text[32];
        int n = 0;
        while (n + 2 < argc && n < MOST && strcmp(argv[n + 2], "--"))
                n++;
        if (n + 3 >= argc || strcmp(argv[n + 2], "--"))
                return 2;
        /* Aside first, so that putting one into place cannot overwrite another. */
        for (int i = 0; i < n; i++)
                if (fcntl(atoi(argv[i + 2]), F_DUPFD, ASIDE + i) != ASIDE + i)
                        return 3;
        for (int i = 0; i < n; i++)
                if (dup2(ASIDE + i, FIRST + i) < 0)
                        return 3;
        close_range(FIRST + (unsigned)n, ~0U, 0);
        snprintf(text, sizeof text, "%d", n);
        setenv("LISTEN_FDS", text, 1);
        setenv("LISTEN_FDNAMES", argv[1], 1);
        snprintf(text, sizeof text, "%d", (int)getpid());
        setenv("LISTEN_PID", text, 1);
        execvp(argv[n + 3], argv + n + 3);
        return 4;
}
