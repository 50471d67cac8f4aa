/* SPDX-License-Identifier: Apache-2.0 */
/* The load generator of one run: its implementer and its reviewer, driven from one thread.
 *
 * Both connect, and then the work goes from one to the other: the implementer reports, the reviewer asks for changes, the
 * implementer reports again. What is timed begins when the frame that moves the work is written and ends when the other
 * worker has read its assignment, with all that comes before it. Acknowledgements and states are sent between two samples
 * and are answered before the next one begins. Anything unexpected ends it with status 1.
 *
 * runload SOCKET IMPLEMENTER-TOKEN REVIEWER-TOKEN ROUNDS PID
 *
 * One JSON object goes to stdout; times are microseconds. `hello` runs from the hello of the last worker, the reviewer, to
 * the implementer's first assignment; `report` ends at the reviewer and `review` at the implementer. `*_bytes` is what
 * that worker received meanwhile. `server_us` is what PID, the broker, ran in a round: two reports, and all that is not
 * timed.
 */
#define _GNU_SOURCE
#include "frames.h"
#include <poll.h>

enum { READ = 262144, TEXT = 512, ROUNDS = 4096, PATIENCE = 20000 };

typedef struct {
        int fd, open; /* `open`: requests that are not answered yet */
        const char *role, *token;
        Buffer in, out, acks;
        char assignment[33];
        int assigned; /* assignments that came */
        unsigned long received;
} Worker;

static Worker implementer = {.role = "implementer"}, reviewer = {.role = "reviewer"};
static unsigned long request;
static char text[TEXT + 1];

static void add(Buffer *b, Worker *w, const char *type, const char *members) {
        char frame[TEXT + 1024];
        int k = snprintf(frame, sizeof frame, "{\"version\":1,\"type\":\"%s\",\"role\":\"%s\",\"token\":\"%s\",\"id\":\"%032lx\",%s}",
                         type, w->role, w->token, ++request, members);
        frame_add(b, frame, (size_t)k);
        w->open++;
}

static void state(Worker *w, const char *name) {
        char members[64];
        snprintf(members, sizeof members, "\"state\":\"%s\",\"usage\":null", name);
        add(&w->out, w, "lifecycle", members);
}

static void take(Worker *w, char *p, size_t n) {
        size_t k;
        char *type = FIELD(p, n, "type", &k), members[128];
        if (type && k == 8 && !memcmp(type, "response", 8)) {
                if (!memmem(p, n, "\"success\":true", 14))
                        bad("refused", p, n);
                w->open--;
                return;
        }
        int work = type && k == 10 && !memcmp(type, "assignment", 10);
        if (!work && !(type && k == 7 && !memcmp(type, "context", 7)))
                bad("unexpected frame", p, n);
        w->received += n;
        char *id = FIELD(p, n, "id", &k);
        if (!id || k != 32)
                bad("delivery without id", p, n);
        snprintf(members, sizeof members, "\"delivery_id\":\"%.32s\",\"status\":\"accepted\"", id);
        add(&w->acks, w, "ack", members);
        if (!work)
                return;
        id = FIELD(p, n, "assignment_id", &k);
        if (!id || k != 32)
                bad("assignment without id", p, n);
        memcpy(w->assignment, id, 32);
        w->assigned++;
}

static void flush(Worker *w) {
        while (w->out.head < w->out.tail) {
                ssize_t k = send(w->fd, w->out.data + w->out.head, w->out.tail - w->out.head, MSG_NOSIGNAL);
                if (k < 0)
                        die("send");
                w->out.head += (size_t)k;
        }
}

/* Waits until something came for a worker and takes it. */
static void turn(void) {
        Worker *workers[] = {&implementer, &reviewer};
        struct pollfd fds[] = {{implementer.fd, POLLIN, 0}, {reviewer.fd, POLLIN, 0}};
        errno = 0;
        if (poll(fds, 2, PATIENCE) <= 0)
                die("no answer");
        for (int i = 0; i < 2; i++) {
                Worker *w = workers[i];
                size_t n;
                if (!fds[i].revents)
                        continue;
                buffer_room(&w->in, READ);
                ssize_t k = recv(w->fd, w->in.data + w->in.tail, w->in.size - w->in.tail, MSG_DONTWAIT);
                if (k <= 0)
                        die("the broker closed a connection");
                w->in.tail += (size_t)k;
                for (char *p; (p = frame_next(&w->in, &n));)
                        take(w, p, n);
        }
}

static void settle(void) {
        Worker *workers[] = {&implementer, &reviewer};
        while (implementer.open || reviewer.open) {
                for (int i = 0; i < 2; i++) {
                        Worker *w = workers[i];
                        buffer_add(&w->out, w->acks.data + w->acks.head, w->acks.tail - w->acks.head);
                        w->acks.head = w->acks.tail;
                        flush(w);
                }
                turn();
        }
        implementer.received = reviewer.received = 0;
}

static void join(Worker *w, const char *path) {
        struct sockaddr_un a = address(path);
        w->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (w->fd < 0 || connect(w->fd, (struct sockaddr *)&a, sizeof a))
                die(path);
        add(&w->out, w, "hello", "\"generation\":1");
}

/* Sends what `from` has to send; microseconds until `to` has one more assignment. */
static double moves(Worker *from, Worker *to) {
        int before = to->assigned;
        double began = now();
        flush(from);
        while (to->assigned == before)
                turn();
        return now() - began;
}

static double reports(Worker *from, Worker *to, const char *kind, const char *claims, unsigned long *bytes) {
        char members[TEXT + 256];
        snprintf(members, sizeof members, "\"assignment_id\":\"%s\",\"report\":{\"kind\":\"%s\",\"summary\":\"%s\",%s}",
                 from->assignment, kind, text, claims);
        add(&from->out, from, "report", members);
        double took = moves(from, to);
        *bytes = to->received;
        state(from, "idle");
        state(to, "active");
        settle();
        return took;
}

static void quantiles(const char *name, float *v, int n, unsigned long bytes, const char *tail) {
        qsort(v, (size_t)n, sizeof *v, ascending);
        printf("\"%s\":{\"p50\":%.2f,\"p90\":%.2f,\"min\":%.2f,\"max\":%.2f},\"%s_bytes\":%lu%s", name, (double)v[n / 2],
               (double)v[n * 9 / 10], (double)v[0], (double)v[n - 1], name, bytes, tail);
}

int main(int argc, char **argv) {
        static float report[ROUNDS], review[ROUNDS];
        int rounds = argc == 6 ? atoi(argv[4]) : 0;
        unsigned long bytes = 0, back = 0;
        if (rounds < 1 || rounds > ROUNDS) {
                fprintf(stderr, "usage: see the head of runload.c\n");
                return 2;
        }
        implementer.token = argv[2];
        reviewer.token = argv[3];
        reviewer.fd = -1; /* poll(2) passes over it */
        memset(text, 'x', TEXT);
        join(&implementer, argv[1]);
        state(&implementer, "idle");
        settle();
        join(&reviewer, argv[1]);
        double hello = moves(&reviewer, &implementer);
        printf("{\"hello\":%.2f,\"hello_bytes\":%lu,", hello, implementer.received);
        state(&reviewer, "idle");
        state(&implementer, "active");
        settle();
        int pid = atoi(argv[5]);
        double since = ran(pid);
        for (int i = 0; i < rounds; i++) {
                report[i] = (float)reports(&implementer, &reviewer, "implementation", "\"changed_paths\":[\"README.md\"]", &bytes);
                review[i] = (float)reports(&reviewer, &implementer, "review", "\"verdict\":\"changes_requested\"", &back);
        }
        printf("\"server_us\":%.1f,", (ran(pid) - since) / rounds);
        quantiles("report", report, rounds, bytes, ",");
        quantiles("review", review, rounds, back, "}\n");
        return 0;
}
