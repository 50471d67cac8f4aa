/* SPDX-License-Identifier: Apache-2.0 */
/* The reference for speed: what a router costs when it has no rules.
 *
 * One thread, one epoll, length-prefixed frames. It registers sessions under the id that they name, forwards a `send`
 * to its target as a `message`, acknowledges it with `delivery_accepted`, and turns `message_received` into `delivered`.
 * Nothing is validated, remembered or limited: fields are found by string search, so it serves the load generator of this
 * directory and nobody else. Output is coalesced per turn of the loop, as in the broker.
 *
 * relay SOCKET
 */
#define _GNU_SOURCE
#include "frames.h"
#include <sys/epoll.h>

enum { CONNECTIONS = 1024, SLOTS = 4096, PENDING = 65536, READ = 65536, EVENTS = 128 };

typedef struct {
        int fd, dirty;
        Buffer in, out;
        char id[128], *info;
        size_t nid, ninfo;
} Connection;

static Connection *connections[CONNECTIONS];
static Connection *dirty[CONNECTIONS];
static int ndirty;
static Connection *slots[SLOTS]; /* by hash of the session id, open addressing; entries are never taken out */
static struct { Connection *sender; char id[64]; size_t nid; } pending[PENDING]; /* by delivery number */
static unsigned long delivery;

static unsigned hash(const char *id, size_t n) {
        unsigned h = 2166136261u;
        for (size_t i = 0; i < n; i++)
                h = (h ^ (unsigned char)id[i]) * 16777619u;
        return h % SLOTS;
}

static Connection **slot(const char *id, size_t n) {
        unsigned h = hash(id, n);
        while (slots[h] && (slots[h]->nid != n || memcmp(slots[h]->id, id, n)))
                h = (h + 1) % SLOTS;
        return &slots[h];
}

static Buffer *reply(Connection *c) {
        if (!c->dirty) {
                c->dirty = 1;
                dirty[ndirty++] = c;
        }
        return &c->out;
}

static void on_register(Connection *c, char *p, size_t n) {
        size_t nid;
        char *id = FIELD(p, n, "sessionId", &nid), *info = memmem(p, n, "\"session\":{", 11), text[256];
        if (!id || !info || nid >= sizeof c->id)
                die("register");
        memcpy(c->id, id, c->nid = nid);
        info += 11;
        size_t ninfo = (size_t)((char *)memchr(info, '}', n - (size_t)(info - p)) - info);
        c->info = malloc(ninfo + nid + 64);
        c->ninfo = (size_t)sprintf(c->info, "{\"id\":\"%.*s\",%.*s,\"trustedLocal\":true,\"origin\":\"local\"}", (int)nid, id, (int)ninfo, info);
        *slot(id, nid) = c;
        int k = snprintf(text, sizeof text, "{\"type\":\"registered\",\"sessionId\":\"%.*s\",\"protocol\":\"pi-intercom\",\"version\":4}", (int)nid, id);
        frame_add(reply(c), text, (size_t)k);
}

static void on_send(Connection *c, char *p, size_t n) {
        size_t nto = 0, nid = 0;
        char *to = FIELD(p, n, "to", &nto), *id = FIELD(p, n, "id", &nid), *body = memmem(p, n, "\"message\":", 10), text[1024];
        if (!to || !id || !body || nid >= sizeof pending[0].id)
                die("send");
        Connection *target = *slot(to, nto);
        if (!target)
                die("send: no target");
        unsigned long number = ++delivery;
        pending[number % PENDING].sender = c;
        memcpy(pending[number % PENDING].id, id, pending[number % PENDING].nid = nid);
        int k = snprintf(text, sizeof text, "{\"type\":\"delivery_accepted\",\"messageId\":\"%.*s\",\"deliveryId\":\"%036lx\"}", (int)nid, id, number);
        frame_add(reply(c), text, (size_t)k);
        k = snprintf(text, sizeof text, "{\"type\":\"message\",\"deliveryId\":\"%036lx\",\"from\":", number);
        char from[512];
        int f = snprintf(from, sizeof from, "%.*s,", (int)c->ninfo, c->info);
        memcpy(text + k, from, (size_t)f);
        frame_add3(reply(target), text, (size_t)(k + f), body, n - (size_t)(body - p), "", 0);
}

static void on_received(char *p, size_t n) {
        size_t k;
        char *id = FIELD(p, n, "deliveryId", &k), text[256];
        if (!id)
                die("message_received");
        unsigned long number = strtoul(id, NULL, 16);
        int m = snprintf(text, sizeof text, "{\"type\":\"delivered\",\"messageId\":\"%.*s\",\"deliveryId\":\"%036lx\"}",
                         (int)pending[number % PENDING].nid, pending[number % PENDING].id, number);
        frame_add(reply(pending[number % PENDING].sender), text, (size_t)m);
}

static void on_list(Connection *c, char *p, size_t n) {
        size_t k, nid;
        char *id = FIELD(p, n, "requestId", &nid);
        if (!id)
                die("list");
        Buffer text = {0};
        char head[256];
        k = (size_t)snprintf(head, sizeof head, "{\"type\":\"sessions\",\"requestId\":\"%.*s\",\"sessions\":[", (int)nid, id);
        buffer_add(&text, head, k);
        for (int fd = 0, first = 1; fd < CONNECTIONS; fd++)
                if (connections[fd] && connections[fd]->info) {
                        if (!first)
                                buffer_add(&text, ",", 1);
                        first = 0;
                        buffer_add(&text, connections[fd]->info, connections[fd]->ninfo);
                }
        frame_add3(reply(c), text.data, text.tail, "]}", 2, "", 0);
        free(text.data);
}

static void dispatch(Connection *c, char *p, size_t n) {
        static const char health[] = "{\"type\":\"health_ok\",\"requestId\":\"probe\"}";
        if (IS(p, n, "send"))
                on_send(c, p, n);
        else if (IS(p, n, "message_received"))
                on_received(p, n);
        else if (IS(p, n, "register"))
                on_register(c, p, n);
        else if (IS(p, n, "list"))
                on_list(c, p, n);
        else if (IS(p, n, "health"))
                frame_add(reply(c), health, sizeof health - 1);
        else
                die("frame");
}

static void gone(Connection *c) {
        connections[c->fd] = NULL;
        close(c->fd);
        c->fd = -1; /* the struct stays: slots and pending deliveries may still name it */
        free(c->in.data);
        free(c->out.data);
        memset(&c->in, 0, sizeof c->in);
        memset(&c->out, 0, sizeof c->out);
        c->info = NULL;
}

static void flush(void) {
        for (int i = 0; i < ndirty; i++) {
                Connection *c = dirty[i];
                c->dirty = 0;
                while (c->fd >= 0 && c->out.head < c->out.tail) {
                        ssize_t k = send(c->fd, c->out.data + c->out.head, c->out.tail - c->out.head, MSG_NOSIGNAL);
                        if (k < 0 && errno == EAGAIN) /* the load generator reads everything: wait for it */
                                continue;
                        if (k < 0) {
                                gone(c);
                                break;
                        }
                        c->out.head += (size_t)k;
                }
        }
        ndirty = 0;
}

static void readable(Connection *c) {
        buffer_room(&c->in, READ);
        ssize_t k = recv(c->fd, c->in.data + c->in.tail, c->in.size - c->in.tail, 0);
        if (k < 0 && errno == EAGAIN)
                return;
        if (k <= 0) {
                gone(c);
                return;
        }
        c->in.tail += (size_t)k;
        size_t n;
        for (char *p; (p = frame_next(&c->in, &n));)
                dispatch(c, p, n);
}

int main(int argc, char **argv) {
        if (argc != 2)
                return 2;
        struct sockaddr_un a = address(argv[1]);
        int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), ep = epoll_create1(EPOLL_CLOEXEC);
        if (listener < 0 || ep < 0 || bind(listener, (struct sockaddr *)&a, sizeof a) || listen(listener, 512))
                die(argv[1]);
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = NULL}, events[EVENTS];
        epoll_ctl(ep, EPOLL_CTL_ADD, listener, &e);
        puts("ready");
        fflush(stdout);
        for (;;) {
                int k = epoll_wait(ep, events, EVENTS, -1);
                for (int i = 0; i < k; i++) {
                        Connection *c = events[i].data.ptr;
                        if (c) {
                                readable(c);
                                continue;
                        }
                        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
                        if (fd < 0)
                                continue;
                        if (fd >= CONNECTIONS || !(c = calloc(1, sizeof *c)))
                                die("accept");
                        c->fd = fd;
                        connections[fd] = c;
                        e.data.ptr = c;
                        epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
                }
                flush();
        }
}
