// A slow network, for LD_PRELOAD: what a process sends over TCP leaves at FT_SLOW_BYTES bytes per second. Compiled by seconds.rs.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double rate, free_at;

__attribute__((constructor)) static void begin(void) {
    if (getenv("FT_SLOW_BYTES")) rate = atof(getenv("FT_SLOW_BYTES"));
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// The connection is busy until these bytes have left.
static ssize_t left(int fd, ssize_t bytes) {
    struct sockaddr_storage own;
    socklen_t size = sizeof own;
    if (bytes <= 0 || rate <= 0 || getsockname(fd, (struct sockaddr *)&own, &size) || own.ss_family != AF_INET) return bytes;
    pthread_mutex_lock(&lock);
    double begun = now();
    if (free_at < begun) free_at = begun;
    free_at += (double)bytes / rate;
    double pause = free_at - begun;
    pthread_mutex_unlock(&lock);
    struct timespec rest = {(time_t)pause, (long)(1e9 * (pause - (double)(time_t)pause))};
    while (nanosleep(&rest, &rest)) {}
    return bytes;
}

ssize_t writev(int fd, const struct iovec *parts, int n) { return left(fd, syscall(SYS_writev, fd, parts, n)); }
ssize_t write(int fd, const void *bytes, size_t size) { return left(fd, syscall(SYS_write, fd, bytes, size)); }
ssize_t send(int fd, const void *bytes, size_t size, int flags) {
    return left(fd, syscall(SYS_sendto, fd, bytes, size, flags, NULL, 0));
}
