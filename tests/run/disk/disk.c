// A disk with faults, for LD_PRELOAD: counts the operations that change files below FT_DISK_ROOT, and with number
// FT_DISK_AT kills the process or fails, or records all of them. Compiled by tests/run/disk.rs.
//
// FT_DISK_MODE: "kill" (before the operation), "half" (the same; of a write half is done), "once"
// (this operation fails with FT_DISK_ERRNO), "from" (this and all later writes fail), "sync" (only syncs are counted, and
// this one fails), "stall" (it takes FT_DISK_ERRNO seconds), "slow" (this and all later ones take FT_DISK_ERRNO
// milliseconds), "record", "count".
// FT_DISK_ROOT that ends with "*": all paths that begin with what is before it.
// FT_DISK_NO_SWAPS: two names cannot be swapped, as on NFS. That is no fault, and is not counted.
// FT_DISK_LOG: the record, of an operation that failed with a capital letter; in the mode "count" a byte for each operation.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *root, *mode = "";
static long at, count;
static int error, no_swaps, record = -1;

__attribute__((constructor)) static void begin(void) {
    root = getenv("FT_DISK_ROOT");
    no_swaps = getenv("FT_DISK_NO_SWAPS") != NULL;
    if (getenv("FT_DISK_MODE")) mode = getenv("FT_DISK_MODE");
    if (getenv("FT_DISK_AT")) at = atol(getenv("FT_DISK_AT"));
    if (getenv("FT_DISK_ERRNO")) error = atoi(getenv("FT_DISK_ERRNO"));
    if (root && getenv("FT_DISK_LOG"))
        record = (int)syscall(SYS_openat, AT_FDCWD, getenv("FT_DISK_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

// The absolute path of `path` below the directory `dir`; NULL if it is not below the root.
static const char *below(int dir, const char *path, char *out) {
    char base[PATH_MAX];
    if (!root) return NULL;
    while (path[0] == '.' && path[1] == '/') path += 2;
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
    } else {
        char link[64];
        if (dir == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return NULL;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
            ssize_t n = readlink(link, base, sizeof base - 1);
            if (n < 0) return NULL;
            base[n] = 0;
        }
        int fits = path[0] ? snprintf(out, PATH_MAX, "%s/%s", base, path) : snprintf(out, PATH_MAX, "%s", base);
        if (fits >= PATH_MAX) return NULL;
    }
    size_t n = strlen(root);
    int begins = n > 0 && root[n - 1] == '*';
    if (begins) n--;
    return strncmp(out, root, n) == 0 && (begins || out[n] == '/' || !out[n]) && !strstr(out, " (deleted)") ? out : NULL;
}

static void put(const void *bytes, size_t size) {
    const char *from = bytes;
    while (size > 0) {
        ssize_t n = syscall(SYS_write, record, from, size);
        if (n <= 0) _exit(99);
        from += n, size -= (size_t)n;
    }
}

// One operation of the record: its letter, two paths, an offset, bytes; each with its length.
static void note(char what, const char *a, const char *b, uint64_t offset, const void *bytes, uint64_t size) {
    if (record < 0) return;
    put(&what, 1);
    if (!strcmp(mode, "count")) return;
    uint32_t length = (uint32_t)strlen(a);
    put(&length, 4), put(a, length);
    length = (uint32_t)strlen(b);
    put(&length, 4), put(b, length);
    put(&offset, 8), put(&size, 8), put(bytes, size);
}

// Before an operation, with the lock. True if it has to fail.
static int fails(char what) {
    int only_syncs = !strcmp(mode, "sync");
    if (only_syncs && what != 's') return 0;
    count++;
    int here = count == at;
    if (here && (!strcmp(mode, "kill") || (!strcmp(mode, "half") && what != 'w'))) kill(getpid(), SIGKILL), pause();
    if (here && !strcmp(mode, "stall")) {
        struct timespec left = {error, 0};
        while (nanosleep(&left, &left)) {}
    }
    if (count >= at && !strcmp(mode, "slow")) {
        struct timespec left = {error / 1000, error % 1000 * 1000000L};
        while (nanosleep(&left, &left)) {}
    }
    if ((here && (only_syncs || !strcmp(mode, "once"))) || (count >= at && !strcmp(mode, "from"))) {
        errno = error;
        return 1;
    }
    return 0;
}

// An operation after it, with its result, or -1 if it had to fail. One that the system refused is not recorded.
static void done(char what, int failed, long result, const char *a, const char *b, uint64_t offset) {
    if (failed || result >= 0) note(failed ? (char)(what - 'a' + 'A') : what, a, b, offset, "", 0);
}

#define BEGIN pthread_mutex_lock(&lock)
#define END(value)                  \
    do {                            \
        __typeof__(value) v_ = (value); \
        int e_ = errno;             \
        pthread_mutex_unlock(&lock); \
        errno = e_;                 \
        return v_;                  \
    } while (0)

static int opened(int dir, const char *path, int flags, mode_t permission) {
    char full[PATH_MAX];
    const char *known = flags & (O_CREAT | O_TRUNC) ? below(dir, path, full) : NULL;
    struct stat stat_;
    int exists = known && lstat(known, &stat_) == 0;
    if (!known || (exists && (!(flags & O_TRUNC) || flags & O_EXCL)))
        return (int)syscall(SYS_openat, dir, path, flags, permission);
    BEGIN;
    char what = exists ? 't' : 'c';
    int failed = fails(what), fd = failed ? -1 : (int)syscall(SYS_openat, dir, path, flags, permission);
    done(what, failed, fd, known, "", 0);
    END(fd);
}

#define OPEN(name, dir_parameter, dir)                  \
    int name(dir_parameter const char *path, int flags, ...) { \
        va_list more;                                   \
        va_start(more, flags);                          \
        mode_t permission = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                   \
        return opened(dir, path, flags, permission);    \
    }
#define COMMA ,
OPEN(open, , AT_FDCWD)
OPEN(open64, , AT_FDCWD)
OPEN(openat, int dir COMMA, dir)
OPEN(openat64, int dir COMMA, dir)

static ssize_t written(int fd, const void *bytes, size_t size, off_t offset, int positioned) {
    char full[PATH_MAX];
    const char *known = fd > 2 ? below(fd, "", full) : NULL;
    struct stat stat_;
    if (!known || fstat(fd, &stat_) || !S_ISREG(stat_.st_mode))
        return positioned ? syscall(SYS_pwrite64, fd, bytes, size, offset) : syscall(SYS_write, fd, bytes, size);
    BEGIN;
    uint64_t place = (uint64_t)offset;
    if (!positioned) place = fcntl(fd, F_GETFL) & O_APPEND ? (uint64_t)stat_.st_size : (uint64_t)lseek(fd, 0, SEEK_CUR);
    int half = count + 1 == at && !strcmp(mode, "half");
    ssize_t n = -1;
    if (fails('w')) {
        done('w', 1, n, known, "", place);
    } else {
        if (half) size /= 2;
        n = positioned ? syscall(SYS_pwrite64, fd, bytes, size, offset) : syscall(SYS_write, fd, bytes, size);
        if (half) kill(getpid(), SIGKILL), pause();
        if (n > 0) note('w', known, "", place, bytes, (uint64_t)n);
    }
    END(n);
}

ssize_t write(int fd, const void *bytes, size_t size) { return written(fd, bytes, size, 0, 0); }
ssize_t pwrite64(int fd, const void *bytes, size_t size, off_t offset) { return written(fd, bytes, size, offset, 1); }
ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset) { return written(fd, bytes, size, offset, 1); }
ssize_t writev(int fd, const struct iovec *parts, int n) {
    char full[PATH_MAX];
    if (fd <= 2 || n < 1 || !below(fd, "", full)) return syscall(SYS_writev, fd, parts, n);
    return write(fd, parts[0].iov_base, parts[0].iov_len);
}
// The caller copies with `read` and `write` instead.
ssize_t copy_file_range(int in, off64_t *a, int out, off64_t *b, size_t size, unsigned flags) {
    (void)in, (void)a, (void)out, (void)b, (void)size, (void)flags;
    errno = ENOSYS;
    return -1;
}

static int of_file(char what, int fd, long number, off_t size) {
    char full[PATH_MAX];
    const char *known = below(fd, "", full);
    if (!known) return (int)syscall(number, fd, size);
    BEGIN;
    int failed = fails(what), rc = failed ? -1 : (int)syscall(number, fd, size);
    done(what, failed, rc, known, "", (uint64_t)size);
    END(rc);
}

int fsync(int fd) { return of_file('s', fd, SYS_fsync, 0); }
int fdatasync(int fd) { return of_file('s', fd, SYS_fdatasync, 0); }
int ftruncate(int fd, off_t size) { return of_file('t', fd, SYS_ftruncate, size); }
int ftruncate64(int fd, off_t size) { return of_file('t', fd, SYS_ftruncate, size); }

// Space for a file whose contents are not written: nothing that survives a loss of power.
int fallocate64(int fd, int flags, off64_t from, off64_t size) {
    char full[PATH_MAX];
    const char *known = below(fd, "", full);
    if (!known) return (int)syscall(SYS_fallocate, fd, flags, from, size);
    BEGIN;
    int failed = fails('f'), rc = failed ? -1 : (int)syscall(SYS_fallocate, fd, flags, from, size);
    done('f', failed, rc, known, "", (uint64_t)size);
    END(rc);
}

static int of_path(char what, int dir, const char *path, long number, long third) {
    char full[PATH_MAX];
    const char *known = below(dir, path, full);
    struct stat stat_;
    // What fails anyway changes nothing.
    if (!known || (lstat(known, &stat_) == 0) == (what == 'm')) return (int)syscall(number, dir, path, third);
    BEGIN;
    int failed = fails(what), rc = failed ? -1 : (int)syscall(number, dir, path, third);
    done(what, failed, rc, known, "", 0);
    END(rc);
}

int mkdir(const char *path, mode_t permission) { return of_path('m', AT_FDCWD, path, SYS_mkdirat, permission); }
int unlink(const char *path) { return of_path('u', AT_FDCWD, path, SYS_unlinkat, 0); }
int rmdir(const char *path) { return of_path('d', AT_FDCWD, path, SYS_unlinkat, AT_REMOVEDIR); }
int unlinkat(int dir, const char *path, int flags) {
    return of_path(flags & AT_REMOVEDIR ? 'd' : 'u', dir, path, SYS_unlinkat, flags);
}

static int renamed(const char *from, const char *to, unsigned flags) {
    char a[PATH_MAX], b[PATH_MAX];
    struct stat stat_;
    if (!below(AT_FDCWD, from, a) || !below(AT_FDCWD, to, b) || lstat(a, &stat_))
        return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, flags);
    BEGIN;
    char what = flags & 2 ? 'x' : 'r';
    int failed = fails(what), rc = failed ? -1 : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, flags);
    done(what, failed, rc, a, b, 0);
    END(rc);
}

int rename(const char *from, const char *to) { return renamed(from, to, 0); }

int symlink(const char *target, const char *path) {
    char full[PATH_MAX];
    if (!below(AT_FDCWD, path, full)) return (int)syscall(SYS_symlinkat, target, AT_FDCWD, path);
    BEGIN;
    int failed = fails('l'), rc = failed ? -1 : (int)syscall(SYS_symlinkat, target, AT_FDCWD, path);
    done('l', failed, rc, full, target, 0);
    END(rc);
}

// A second name of a file.
static int linked(int old, const char *from, int dir, const char *path, int flags) {
    char full[PATH_MAX], source[PATH_MAX];
    struct stat stat_;
    const char *known = below(dir, path, full);
    // What fails anyway changes nothing.
    if (!known || !below(old, from, source) || lstat(source, &stat_) || lstat(known, &stat_) == 0)
        return (int)syscall(SYS_linkat, old, from, dir, path, flags);
    BEGIN;
    int failed = fails('h'), rc = failed ? -1 : (int)syscall(SYS_linkat, old, from, dir, path, flags);
    done('h', failed, rc, known, source, 0);
    END(rc);
}

int link(const char *from, const char *path) { return linked(AT_FDCWD, from, AT_FDCWD, path, 0); }
int linkat(int old, const char *from, int dir, const char *path, int flags) { return linked(old, from, dir, path, flags); }

// ft swaps two names by `syscall(SYS_renameat2, ..., RENAME_EXCHANGE)`; its other calls go to the system as they are.
long syscall(long number, ...) {
    va_list more;
    va_start(more, number);
    long p[6];
    for (int i = 0; i < 6; i++) p[i] = va_arg(more, long);
    va_end(more);
    static __thread int inside;
    if (number == SYS_renameat2 && p[4] == 2 && no_swaps) {
        errno = EINVAL;
        return -1;
    }
    if (number == SYS_renameat2 && !inside && p[4] == 2) {
        inside = 1;
        int rc = renamed((const char *)p[1], (const char *)p[3], 2);
        inside = 0;
        return rc;
    }
    long rc;
#if defined(__x86_64__)
    register long r10 __asm__("r10") = p[3];
    register long r8 __asm__("r8") = p[4];
    register long r9 __asm__("r9") = p[5];
    __asm__ volatile("syscall" : "=a"(rc) : "a"(number), "D"(p[0]), "S"(p[1]), "d"(p[2]), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = p[0];
    register long x1 __asm__("x1") = p[1];
    register long x2 __asm__("x2") = p[2];
    register long x3 __asm__("x3") = p[3];
    register long x4 __asm__("x4") = p[4];
    register long x5 __asm__("x5") = p[5];
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    rc = x0;
#else
#error "no system call for this processor"
#endif
    if (rc < 0 && rc > -4096) {
        errno = (int)-rc;
        return -1;
    }
    return rc;
}

// FT_CLOCK: seconds since 1970 that the clock shows at first; it jumps back and forth by a day with every look.
// FT_CLOCK_FAILS: THREAD:FILE. From when the file is there, the clock of pauses fails once in each thread of this name, for the program
// but not for its libraries. The program panics there.
static int clock_fails(clockid_t clock, void *caller) {
    static __thread int failed;
    const char *how = clock == CLOCK_MONOTONIC && !failed ? getenv("FT_CLOCK_FAILS") : NULL;
    const char *file = how ? strchr(how, ':') : NULL;
    char name[16] = "";
    if (!file || prctl(PR_GET_NAME, name) || strlen(name) != (size_t)(file - how) || strncmp(how, name, strlen(name))) return 0;
    Dl_info from;
    const char *of = dladdr(caller, &from) && from.dli_fname ? strrchr(from.dli_fname, '/') : NULL;
    if (!of || strcmp(of, "/ft") || syscall(SYS_faccessat, AT_FDCWD, file + 1, F_OK)) return 0;
    return failed = 1;
}

int clock_gettime(clockid_t clock, struct timespec *out) {
    if (clock_fails(clock, __builtin_return_address(0))) {
        errno = EINVAL;
        return -1;
    }
    int rc = (int)syscall(SYS_clock_gettime, clock, out);
    const char *from = clock == CLOCK_REALTIME ? getenv("FT_CLOCK") : NULL;
    static long looks;
    if (rc == 0 && from) out->tv_sec = atol(from) + (looks++ % 3 - 1) * 86400;
    return rc;
}

// FT_SOCKETS: a file that appears if the program opens or connects a socket, or looks up a name.
static int tell_network(void) {
    const char *told = getenv("FT_SOCKETS");
    if (!told) return 0;
    long fd = syscall(SYS_openat, AT_FDCWD, told, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd >= 0) syscall(SYS_close, fd);
    return 1;
}

int socket(int domain, int type, int protocol) {
    tell_network();
    return (int)syscall(SYS_socket, domain, type, protocol);
}

// Without <sys/socket.h> and <netdb.h>: their types do not matter here.
int connect(int fd, const void *to, unsigned size) {
    tell_network();
    return (int)syscall(SYS_connect, fd, to, size);
}

// The C library looks names up with its own sockets, which are not seen above. With FT_SOCKETS it is not asked, so that a test
// does not depend on the network: the answer is EAI_NONAME.
int getaddrinfo(const char *node, const char *service, const void *hints, void **found) {
    if (tell_network()) return -2;
    int (*next)(const char *, const char *, const void *, void **);
    *(void **)&next = dlsym(RTLD_NEXT, "getaddrinfo");
    return next(node, service, hints, found);
}
