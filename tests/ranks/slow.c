// A slow network and slow files, for LD_PRELOAD. What a process sends over TCP leaves at FT_SLOW_BYTES bytes per second; a connection that is
// busy takes nothing, as one whose buffer is full. A read of a file whose path begins with FT_SLOW_FILES takes FT_SLOW_READ milliseconds, a
// read at a position FT_SLOW_PREAD; with FT_SLOW_WHEN only as soon as there is a file of this name. FT_SLOW_TIMES gets a line for each such
// read: the seconds of a clock. Compiled by seconds.rs and hangs.rs.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

// Seconds of bytes that may leave at once, or later than they could.
static const double BURST = 0.02;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double rate, free_at;
static const char *files, *when, *times_file;
static long read_ms, pread_ms;

__attribute__((constructor)) static void begin(void) {
    if (getenv("FT_SLOW_BYTES")) rate = atof(getenv("FT_SLOW_BYTES"));
    if (getenv("FT_SLOW_READ")) read_ms = atol(getenv("FT_SLOW_READ"));
    if (getenv("FT_SLOW_PREAD")) pread_ms = atol(getenv("FT_SLOW_PREAD"));
    files = getenv("FT_SLOW_FILES");
    when = getenv("FT_SLOW_WHEN");
    times_file = getenv("FT_SLOW_TIMES");
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int is_slow(int fd) {
    struct sockaddr_storage own;
    socklen_t size = sizeof own;
    return rate > 0 && !getsockname(fd, (struct sockaddr *)&own, &size) && own.ss_family == AF_INET && fcntl(fd, F_GETFL) & O_NONBLOCK;
}

static ssize_t sent(int fd, const struct iovec *parts, int n) {
    if (!is_slow(fd)) return syscall(SYS_writev, fd, parts, n);
    pthread_mutex_lock(&lock);
    double at = now();
    ssize_t done = -1;
    if (at < free_at) {
        errno = EAGAIN;
    } else {
        // As much as leaves in a burst.
        struct iovec some[16];
        size_t most = (size_t)(rate * BURST) + 1;
        int count = 0;
        for (; count < n && count < 16 && most > 0; count++) {
            some[count] = parts[count];
            if (some[count].iov_len > most) some[count].iov_len = most;
            most -= some[count].iov_len;
        }
        done = syscall(SYS_writev, fd, some, count);
        if (free_at < at - BURST) free_at = at - BURST;
        if (done > 0) free_at += (double)done / rate;
    }
    int e = errno;
    pthread_mutex_unlock(&lock);
    errno = e;
    return done;
}

ssize_t writev(int fd, const struct iovec *parts, int n) { return sent(fd, parts, n); }
ssize_t write(int fd, const void *bytes, size_t size) {
    struct iovec part = {(void *)bytes, size};
    return sent(fd, &part, 1);
}
ssize_t send(int fd, const void *bytes, size_t size, int flags) {
    struct iovec part = {(void *)bytes, size};
    return is_slow(fd) ? sent(fd, &part, 1) : syscall(SYS_sendto, fd, bytes, size, flags, NULL, 0);
}

static void note_time(void) {
    char line[64];
    int size = snprintf(line, sizeof line, "%.3f\n", now());
    int out = times_file ? open(times_file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    if (out < 0) return;
    syscall(SYS_write, out, line, (size_t)size);
    close(out);
}

static void pause_for(int fd, long ms) {
    if (!files || ms <= 0 || (when && access(when, F_OK))) return;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n > 0 && (size_t)n >= strlen(files) && !strncmp(path, files, strlen(files))) {
        struct timespec left = {ms / 1000, ms % 1000 * 1000000L};
        note_time();
        while (nanosleep(&left, &left)) {}
    }
}

ssize_t read(int fd, void *bytes, size_t size) {
    pause_for(fd, read_ms);
    return syscall(SYS_read, fd, bytes, size);
}

ssize_t pread(int fd, void *bytes, size_t size, off_t at) {
    pause_for(fd, pread_ms);
    return syscall(SYS_pread64, fd, bytes, size, at);
}
#ifdef __GLIBC__
// The name that Rust calls; elsewhere it is that above.
ssize_t pread64(int fd, void *bytes, size_t size, off64_t at) { return pread(fd, bytes, size, at); }
#endif
