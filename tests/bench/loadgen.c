/* SPDX-License-Identifier: Apache-2.0 */
/* The load generator: sessions of one broker, relay or router, driven from one thread.
 *
 * It is in C because a generator in Python costs more per message than the broker, and would hide what is to be measured
 * behind its own share: every ratio would come near 1. Here one message costs the generator a few system calls, so that
 * with 60 pairs the server is the bottleneck, also when the server is the relay. The calibration row (an asyncio router
 * without rules) shows whether that holds on a machine: about 1.8 times the relay's time and a third of its rate.
 *
 * Frames that belong to other sessions (session_joined, session_left, presence_update) are skipped. Anything unexpected
 * ends the run with status 1, so that a refused message never passes for a fast one.
 *
 * loadgen latency SOCKET PREFIX SESSIONS SECONDS [BYTES]   one message at a time between the first two sessions; BYTES is
 *                 the length of its text
 * loadgen pairs   SOCKET PREFIX PAIRS WINDOW PID SECONDS   session i sends to i+PAIRS, WINDOW outstanding each; PID is
 *                 the server's, whose processor time per message is noted too: it does not depend on who else is running
 * loadgen list    SOCKET PREFIX SESSIONS SECONDS   one `list` at a time
 *
 * PREFIX makes session and message ids unique among runs against one server. One JSON object goes to stdout; times are
 * microseconds.
 */
#define _GNU_SOURCE
#include "frames.h"
#include <sys/epoll.h>
#include <sys/resource.h>

enum { SESSIONS = 256, READ = 262144, EVENTS = 256, TEXT = 512, TEXT_MAX = 65536, SAMPLES = 2000000, WARMUP = 300 };

typedef struct {
        int fd, registered, dirty;
        char id[64];
        Buffer in, out;
        char *send;       /* the prebuilt `send` frame of this session */
        size_t nsend, at; /* `at`: where its 12-digit message number stands */
} Session;

static Session sessions[SESSIONS];
static Session *dirty[SESSIONS];
static int count, ep, ndirty, length = TEXT;
static unsigned long number;
static const char *prefix;
static float *first, *second;

static Buffer *output(Session *s) {
        if (!s->dirty) {
                s->dirty = 1;
                dirty[ndirty++] = s;
        }
        return &s->out;
}

static void flush(void) {
        for (int i = 0; i < ndirty; i++) {
                Session *s = dirty[i];
                s->dirty = 0;
                while (s->out.head < s->out.tail) {
                        ssize_t k = send(s->fd, s->out.data + s->out.head, s->out.tail - s->out.head, MSG_NOSIGNAL);
                        if (k < 0)
                                die("send");
                        s->out.head += (size_t)k;
                }
        }
        ndirty = 0;
}

static int fill(Session *s) {
        buffer_room(&s->in, READ);
        ssize_t k = recv(s->fd, s->in.data + s->in.tail, s->in.size - s->in.tail, MSG_DONTWAIT);
        if (k < 0 && errno == EAGAIN)
                return 0;
        if (k <= 0) {
                if (k == 0)
                        errno = 0;
                die("the server closed a connection");
        }
        s->in.tail += (size_t)k;
        return 1;
}

static void connect_session(const char *path, int i) {
        Session *s = &sessions[i];
        char text[1024];
        struct sockaddr_un a = address(path);
        s->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (s->fd < 0 || connect(s->fd, (struct sockaddr *)&a, sizeof a))
                die(path);
        snprintf(s->id, sizeof s->id, "%s-session-%03d", prefix, i);
        int k = snprintf(text, sizeof text,
                         "{\"type\":\"register\",\"protocol\":\"pi-intercom\",\"version\":4,\"session\":{\"name\":\"bench %03d\","
                         "\"cwd\":\"/srv/projects/example\",\"model\":\"bench\",\"pid\":%d,\"startedAt\":1700000000000,"
                         "\"lastActivity\":1700000000000,\"status\":\"idle\"},\"sessionId\":\"%s\"}", i, getpid(), s->id);
        frame_add(output(s), text, (size_t)k);
        flush();
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = s};
        epoll_ctl(ep, EPOLL_CTL_ADD, s->fd, &e);
}

static int skipped(const char *p, size_t n) {
        return IS(p, n, "session_joined") || IS(p, n, "session_left") || IS(p, n, "presence_update");
}

/* Registrations go one by one: a broker admits few connections that have not registered yet. */
static void start(const char *path, int n) {
        struct epoll_event events[EVENTS];
        size_t length;
        for (count = 0; count < n; count++) {
                connect_session(path, count);
                while (!sessions[count].registered) {
                        int k = epoll_wait(ep, events, EVENTS, 10000);
                        if (k <= 0)
                                die("register: no answer");
                        for (int i = 0; i < k; i++) {
                                Session *s = events[i].data.ptr;
                                fill(s);
                                for (char *p; (p = frame_next(&s->in, &length));)
                                        if (IS(p, length, "registered"))
                                                s->registered = 1;
                                        else if (!skipped(p, length))
                                                bad("register", p, length);
                        }
                }
        }
}

static void prepare(Session *s, const char *to) {
        char text[TEXT_MAX + 1], frame[TEXT_MAX + 512];
        memset(text, 'x', (size_t)length);
        text[length] = 0;
        int k = snprintf(frame, sizeof frame,
                         "{\"type\":\"send\",\"to\":\"%s\",\"message\":{\"id\":\"%s-000000000000\",\"timestamp\":1700000000000,"
                         "\"content\":{\"text\":\"%s\"}}}", to, prefix, text);
        s->nsend = (size_t)k;
        s->send = malloc(s->nsend);
        if (!s->send)
                die("malloc");
        memcpy(s->send, frame, s->nsend);
        s->at = (size_t)((char *)memmem(frame, s->nsend, "-000000000000", 13) + 1 - frame);
}

static void post(Session *s) {
        unsigned long v = ++number;
        for (int i = 11; i >= 0; i--, v /= 10)
                s->send[s->at + (size_t)i] = (char)('0' + v % 10);
        frame_add(output(s), s->send, s->nsend);
}

static void acknowledge(Session *s, const char *p, size_t n) {
        char text[256];
        size_t k;
        char *id = FIELD(p, n, "deliveryId", &k);
        if (!id)
                bad("message without deliveryId", p, n);
        int m = snprintf(text, sizeof text, "{\"type\":\"message_received\",\"deliveryId\":\"%.*s\"}", (int)k, id);
        frame_add(output(s), text, (size_t)m);
}

/* Reads what is there and answers messages; returns how many of the session's sends were reported delivered. */
static int serve(Session *s, int *messages) {
        size_t n;
        int done = 0;
        if (!fill(s))
                return 0;
        for (char *p; (p = frame_next(&s->in, &n));) {
                if (IS(p, n, "message")) {
                        acknowledge(s, p, n);
                        (*messages)++;
                } else if (IS(p, n, "delivered"))
                        done++;
                else if (!IS(p, n, "delivery_accepted") && !skipped(p, n))
                        bad("unexpected frame", p, n);
        }
        return done;
}

static void quantiles(const char *name, float *v, unsigned long n, const char *tail) {
        qsort(v, n, sizeof *v, ascending);
        printf("\"%s\":{\"p50\":%.2f,\"p90\":%.2f,\"p99\":%.2f,\"min\":%.2f,\"max\":%.2f}%s", name, (double)v[n / 2],
               (double)v[n * 9 / 10], (double)v[n * 99 / 100], (double)v[0], (double)v[n - 1], tail);
}

static double cpu(void) {
        struct rusage r;
        getrusage(RUSAGE_SELF, &r);
        return (double)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) + (double)(r.ru_utime.tv_usec + r.ru_stime.tv_usec) / 1e6;
}

static void latency(double seconds) {
        struct epoll_event events[EVENTS];
        unsigned long n = 0, total = 0;
        prepare(&sessions[0], sessions[1].id);
        prepare(&sessions[1], sessions[0].id);
        for (double end = 0; total < WARMUP || (now() < end && n < SAMPLES); total++) {
                Session *s = &sessions[total % 2];
                int messages = 0, done = 0;
                post(s);
                double began = now(), arrived = 0;
                flush();
                while (!done) {
                        int k = epoll_wait(ep, events, EVENTS, 10000);
                        if (k <= 0)
                                die("no answer to a send");
                        for (int i = 0; i < k; i++) {
                                done += serve(events[i].data.ptr, &messages);
                                if (messages && !arrived)
                                        arrived = now();
                        }
                        flush();
                }
                double finished = now();
                if (total < WARMUP) {
                        end = finished + seconds * 1e6;
                        continue;
                }
                first[n] = (float)(arrived - began);
                second[n++] = (float)(finished - began);
        }
        if (!n)
                die("no sample");
        printf("{\"samples\":%lu,", n);
        quantiles("message", first, n, ",");
        quantiles("delivered", second, n, "}\n");
}

static void pairs(int n, int window, int pid, double seconds) {
        struct epoll_event events[EVENTS];
        unsigned long done = 0;
        int messages = 0;
        for (int i = 0; i < n; i++) {
                prepare(&sessions[i], sessions[i + n].id);
                for (int w = 0; w < window; w++)
                        post(&sessions[i]);
        }
        double warm = now() + seconds * 1e6 * 0.2, begin = 0, end = 0, busy = 0, server = 0, t;
        for (;;) {
                flush();
                int k = epoll_wait(ep, events, EVENTS, 10000);
                if (k <= 0)
                        die("no progress");
                for (int i = 0; i < k; i++) {
                        Session *s = events[i].data.ptr;
                        for (int d = serve(s, &messages); d > 0; d--, done++)
                                post(s);
                }
                t = now();
                if (!begin && t >= warm) {
                        begin = t;
                        end = t + seconds * 1e6;
                        busy = cpu();
                        server = ran(pid);
                        done = 0;
                }
                if (begin && t >= end && done)
                        break;
        }
        printf("{\"delivered\":%lu,\"rate\":%.1f,\"generator_cpu\":%.3f,\"server_us\":%.3f}\n", done,
               (double)done / ((t - begin) / 1e6), (cpu() - busy) / ((t - begin) / 1e6), (ran(pid) - server) / (double)done);
}

static void list(double seconds) {
        struct epoll_event events[EVENTS];
        Session *s = &sessions[0];
        unsigned long n = 0, total = 0;
        size_t length, bytes = 0;
        for (double end = 0; total < WARMUP / 10 || (now() < end && n < SAMPLES); total++) {
                char text[128];
                int k = snprintf(text, sizeof text, "{\"type\":\"list\",\"requestId\":\"%s-%012lu\"}", prefix, total), done = 0;
                frame_add(output(s), text, (size_t)k);
                double began = now();
                flush();
                while (!done) {
                        k = epoll_wait(ep, events, EVENTS, 10000);
                        if (k <= 0)
                                die("no answer to list");
                        for (int i = 0; i < k; i++) {
                                Session *from = events[i].data.ptr;
                                fill(from);
                                for (char *p; (p = frame_next(&from->in, &length));)
                                        if (IS(p, length, "sessions")) {
                                                done = 1;
                                                bytes = length;
                                        } else if (!skipped(p, length))
                                                bad("unexpected frame", p, length);
                        }
                }
                double finished = now();
                if (total < WARMUP / 10)
                        end = finished + seconds * 1e6;
                else
                        first[n++] = (float)(finished - began);
        }
        if (!n)
                die("no sample");
        printf("{\"samples\":%lu,\"bytes\":%zu,", n, bytes);
        quantiles("list", first, n, "}\n");
}

int main(int argc, char **argv) {
        int pairing = argc == 8 && !strcmp(argv[1], "pairs"), sized = argc == 7 && !strcmp(argv[1], "latency");
        if (argc != 6 && !pairing && !sized) {
                fprintf(stderr, "usage: see the head of loadgen.c\n");
                return 2;
        }
        int n = atoi(argv[4]) * (pairing ? 2 : 1);
        double seconds = atof(argv[pairing ? 7 : 5]);
        if (sized)
                length = atoi(argv[6]);
        if (n < 1 || n > SESSIONS || strlen(argv[3]) > 32 || seconds <= 0 || length < 1 || length > TEXT_MAX) {
                fprintf(stderr, "out of range\n");
                return 2;
        }
        prefix = argv[3];
        first = malloc(SAMPLES * sizeof *first);
        second = malloc(SAMPLES * sizeof *second);
        ep = epoll_create1(EPOLL_CLOEXEC);
        if (!first || !second || ep < 0)
                die("start");
        start(argv[2], n);
        if (pairing)
                pairs(n / 2, atoi(argv[5]), atoi(argv[6]), seconds);
        else if (!strcmp(argv[1], "latency") && n >= 2)
                latency(seconds);
        else if (!strcmp(argv[1], "list"))
                list(seconds);
        else
                return 2;
        return 0;
}
