/* SPDX-License-Identifier: Apache-2.0 */
/* What the C programs share: growing buffers, length-prefixed frames, plain string search, time. */
#ifndef BENCH_FRAMES_H
#define BENCH_FRAMES_H

#include <arpa/inet.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { FRAME_MAX = 1048576, HEADER = 4 };

static inline void die(const char *what) {
        fprintf(stderr, "%s: %s\n", what, errno ? strerror(errno) : "unexpected");
        exit(1);
}

static inline void bad(const char *what, const char *p, size_t n) {
        fprintf(stderr, "%s: %.*s\n", what, (int)(n < 400 ? n : 400), p);
        exit(1);
}

/* Monotonic microseconds. */
static inline double now(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

/* Microseconds that the main thread of a process has run. */
static inline double ran(int pid) {
        char path[64];
        double ns;
        snprintf(path, sizeof path, "/proc/%d/schedstat", pid);
        FILE *f = fopen(path, "r");
        if (!f || fscanf(f, "%lf", &ns) != 1)
                die(path);
        fclose(f);
        return ns / 1e3;
}

static inline int ascending(const void *a, const void *b) {
        float x = *(const float *)a, y = *(const float *)b;
        return (x > y) - (x < y);
}

/* Bytes from `head` to `tail` are in use. */
typedef struct {
        char *data;
        size_t head, tail, size;
} Buffer;

static inline void buffer_room(Buffer *b, size_t need) {
        if (b->head == b->tail)
                b->head = b->tail = 0;
        if (b->size - b->tail >= need)
                return;
        memmove(b->data, b->data + b->head, b->tail - b->head);
        b->tail -= b->head;
        b->head = 0;
        if (b->size - b->tail >= need)
                return;
        b->size = (b->tail + need) * 2;
        b->data = realloc(b->data, b->size);
        if (!b->data)
                die("realloc");
}

static inline void buffer_add(Buffer *b, const void *bytes, size_t n) {
        buffer_room(b, n);
        memcpy(b->data + b->tail, bytes, n);
        b->tail += n;
}

/* One frame made of up to three pieces, so that a forwarded body is copied once. */
static inline void frame_add3(Buffer *b, const char *x, size_t nx, const char *y, size_t ny, const char *z, size_t nz) {
        uint32_t length = htonl((uint32_t)(nx + ny + nz));
        buffer_room(b, HEADER + nx + ny + nz);
        memcpy(b->data + b->tail, &length, HEADER);
        memcpy(b->data + b->tail + HEADER, x, nx);
        memcpy(b->data + b->tail + HEADER + nx, y, ny);
        memcpy(b->data + b->tail + HEADER + nx + ny, z, nz);
        b->tail += HEADER + nx + ny + nz;
}

static inline void frame_add(Buffer *b, const char *payload, size_t n) {
        frame_add3(b, payload, n, "", 0, "", 0);
}

/* The next whole frame, or NULL; `head` moves past it and the pointer holds until the buffer is next filled. */
static inline char *frame_next(Buffer *b, size_t *n) {
        uint32_t length;
        if (b->tail - b->head < HEADER)
                return NULL;
        memcpy(&length, b->data + b->head, HEADER);
        length = ntohl(length);
        if (length == 0 || length > FRAME_MAX) {
                errno = 0;
                die("frame length");
        }
        if (b->tail - b->head < HEADER + (size_t)length)
                return NULL;
        char *payload = b->data + b->head + HEADER;
        b->head += HEADER + length;
        *n = length;
        return payload;
}

/* The text between `key` (with its opening quote) and the next quote; NULL when it is not there. */
static inline char *field(const char *payload, size_t n, const char *key, size_t nkey, size_t *length) {
        char *at = memmem(payload, n, key, nkey);
        if (!at)
                return NULL;
        at += nkey;
        char *end = memchr(at, '"', n - (size_t)(at - payload));
        if (!end)
                return NULL;
        *length = (size_t)(end - at);
        return at;
}
#define FIELD(payload, n, key, length) field(payload, n, "\"" key "\":\"", sizeof("\"" key "\":\"") - 1, length)
#define IS(payload, n, type) \
        ((n) >= sizeof("{\"type\":\"" type "\"") - 1 && \
         !memcmp(payload, "{\"type\":\"" type "\"", sizeof("{\"type\":\"" type "\"") - 1))

static inline struct sockaddr_un address(const char *path) {
        struct sockaddr_un a = {.sun_family = AF_UNIX};
        if (strlen(path) >= sizeof a.sun_path) {
                errno = ENAMETOOLONG;
                die(path);
        }
        strcpy(a.sun_path, path);
        return a;
}

#endif
