// Storage that fails. Loaded before libc (LD_PRELOAD), this counts a process's storage calls below
// one directory, writes them to a journal, and lets them fail as the environment asks:
//
// FAULTS_BELOW    the directory
// FAULTS_JOURNAL  the file that each call is appended to, with its data, in the order of calls
// FAULTS_KIND     io, full, short, interrupted (once); gone, filled (from then on); exit (the
//                 process ends before the call, as if killed)
// FAULTS_AT       the number of the call that fails
// FAULTS_ON       instead: the first call of this name and end of a path, as in "rename step-3"
// FAULTS_THREADS  how many threads start; later ones fail, as at a limit of processes
// FAULTS_FLOCK    the number of an error: each lock fails with it, as on a file system without locks
//
// Nothing is synced, because a test that loses power keeps its own disk (disk.rs): a sync only
// stands in the journal. After two minutes the process is ended by SIGALRM: a hang.
//
// A record is "number class name inode offset length path[TAB other path]", a line, then that many
// bytes and a newline. Before the name: "!" if the call was made to fail or cut short, "~" if it
// failed by itself. Classes:
// r reads data, q asks, w writes data, s needs space for a name or a size, d removes, o is output.
#include <atomic>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <string>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

#define REAL(name) reinterpret_cast<decltype(&name)>(dlsym(RTLD_NEXT, #name))

namespace {

pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
std::string *directory, *kind, *on;
int journal = -1;
long fails_at = -1, calls = 0;
bool failed = false;

std::string setting(const char* name) {
    const char* value = getenv(name);
    return value ? value : "";
}

bool is_below(const std::string& path) {
    if (!directory || path.compare(0, directory->size(), *directory) != 0) return false;
    return path.size() == directory->size() || path[directory->size()] == '/';
}

std::string path_of(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = fd < 0 || !directory ? -1 : readlink(link, path, sizeof path);
    return length < 0 ? "" : std::string(path, length);
}

std::string path_at(int fd, const char* path) {
    if (!path || path[0] == '/' || fd == AT_FDCWD) return path ? path : "";
    std::string folder = path_of(fd);
    return path[0] ? folder + "/" + path : folder;
}

unsigned long inode(const std::string& path) {
    struct stat found;
    return lstat(path.c_str(), &found) == 0 ? found.st_ino : 0;
}

void append(const void* data, size_t length) {
    for (size_t done = 0; done < length;) {
        ssize_t count = REAL(write)(journal, static_cast<const char*>(data) + done, length - done);
        if (count < 0) abort();
        done += count;
    }
}

// One call below the directory. No other is made while it lives.
struct Call {
    char what;
    std::string name, path, other;
    long number;
    int error = 0;
    bool is_short = false;

    Call(char what, const char* name, std::string path, std::string other = "")
        : what(what), name(name), path(path), other(other) {
        pthread_mutex_lock(&one_at_a_time);
        number = calls++;
        const std::string& end = other.empty() ? path : other;
        std::string wanted = on->empty() ? "" : on->substr(on->find(' ') + 1);
        bool is_it = on->empty() ? number == fails_at
            : on->substr(0, on->find(' ')) == name && end.size() >= wanted.size()
                && end.compare(end.size() - wanted.size(), wanted.size(), wanted) == 0;
        bool goes_on = *kind == "gone" || *kind == "filled";
        if (!(is_it && !failed) && !(failed && goes_on)) return;
        bool moves = what == 'r' || what == 'w';
        if (*kind == "exit") {
            record("!", 0, 0, nullptr, 0);
            _exit(137);
        }
        if (*kind == "io" || *kind == "gone") error = EIO;
        if ((*kind == "full" || *kind == "filled") && (what == 'w' || what == 's')) error = ENOSPC;
        if (*kind == "interrupted" && moves) error = EINTR;
        is_short = *kind == "short" && moves;
        failed = true;
    }

    ~Call() { pthread_mutex_unlock(&one_at_a_time); }

    // `mark`: "!" for a call that was made to fail, "~" for one that failed by itself, or none.
    void record(const char* mark, unsigned long inode, long at, const void* data, size_t length) {
        if (journal < 0) return;
        char head[128];
        snprintf(head, sizeof head, "%ld %c %s%s %lu %ld %zu ", number, what, mark, name.c_str(),
                 inode, at, length);
        std::string line = head + path + (other.empty() ? "" : "\t" + other) + "\n";
        append(line.data(), line.size());
        append(data, length);
        append("\n", 1);
    }

    bool fails() {
        if (!error) return false;
        record("!", 0, 0, nullptr, 0);
        errno = error;
        return true;
    }

    // The length of a request that may be cut short. Direct I/O is short by whole pages.
    size_t cut(size_t length) const {
        if (!is_short || length < 2) return length;
        if (length % 4096 == 0) return length >= 8192 ? length / 8192 * 4096 : length;
        return length / 2;
    }
};

int allocate(int fd, long end) {
    std::string path = path_of(fd);
    struct stat found;
    if (is_below(path)) {
        Call call('s', "fallocate", path);
        if (call.fails()) return -call.error;
        call.record("", inode(path), end, nullptr, 0);
    }
    // Space is not what these tests measure: the size is enough.
    if (fstat(fd, &found) == 0 && found.st_size < end) return REAL(ftruncate64)(fd, end);
    return 0;
}

// fallocate comes without libc: the system signals it instead.
void on_system_call(int, siginfo_t*, void* context) {
    int before = errno;
#if defined(__x86_64__)
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    long end = registers[REG_RDX] + registers[REG_R10];
    registers[REG_RAX] = allocate(static_cast<int>(registers[REG_RDI]), end);
#elif defined(__aarch64__)
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.regs;
    registers[0] = allocate(static_cast<int>(registers[0]), registers[2] + registers[3]);
#endif
    errno = before;
}

__attribute__((constructor)) void start() {
    std::string below = setting("FAULTS_BELOW");
    if (below.empty()) return;
    alarm(120);
    kind = new std::string(setting("FAULTS_KIND"));
    on = new std::string(setting("FAULTS_ON"));
    if (!setting("FAULTS_AT").empty()) fails_at = atol(setting("FAULTS_AT").c_str());
    std::string to = setting("FAULTS_JOURNAL");
    int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC;
    if (!to.empty()) journal = REAL(open64)(to.c_str(), flags, 0666);
    directory = new std::string(below);
#if defined(__x86_64__) || defined(__aarch64__)
    struct sigaction action = {};
    action.sa_sigaction = on_system_call;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSYS, &action, nullptr);
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_fallocate, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    sock_fprog program = {sizeof filter / sizeof *filter, filter};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
#endif
}

int open_at(int fd, const char* name, int flags, mode_t mode) {
    auto real = REAL(openat64);
    std::string path = path_at(fd, name);
    if (!is_below(path)) return real(fd, name, flags, mode);
    unsigned long before = inode(path);
    bool creates = (flags & O_CREAT) && !before, cuts = (flags & O_TRUNC) && before;
    Call call(creates || cuts ? 's' : 'q', creates ? "create" : cuts ? "truncate" : "open", path);
    if (call.fails()) return -1;
    int opened = real(fd, name, flags, mode);
    int problem = errno;
    call.record(opened < 0 ? "~" : "", inode(path), 0, nullptr, 0);
    errno = problem;
    return opened;
}

ssize_t put(int fd, const void* data, size_t length, long at, const std::string& path) {
    Call call('w', "write", path);
    if (call.fails()) return -1;
    bool has_place = at >= 0;
    if (!has_place) at = lseek(fd, 0, SEEK_CUR);
    length = call.cut(length);
    ssize_t count =
        has_place ? REAL(pwrite64)(fd, data, length, at) : REAL(write)(fd, data, length);
    int problem = errno;
    struct stat found = {};
    fstat(fd, &found);
    const char* mark = count < 0 ? "~" : call.is_short ? "!" : "";
    call.record(mark, found.st_ino, at, data, count < 0 ? 0 : count);
    errno = problem;
    return count;
}

int synced(int fd, int (*)(int)) {
    std::string path = path_of(fd);
    if (!is_below(path)) return 0;
    Call call('s', "sync", path);
    if (call.fails()) return -1;
    struct stat found = {};
    fstat(fd, &found);
    call.record("", found.st_ino, 0, nullptr, 0);
    return 0;
}

// A call that changes one name, or two.
template <typename Real>
int change(char what, const char* name, std::string path, std::string other, Real real) {
    if (!is_below(path)) return real();
    Call call(what, name, path, other);
    if (call.fails()) return -1;
    int result = real();
    int problem = errno;
    const std::string& made = other.empty() ? path : other;
    call.record(result == 0 ? "" : "~", inode(made), 0, nullptr, 0);
    errno = problem;
    return result;
}

// A call that asks, and fails with `none`.
template <typename Real, typename Result>
Result ask(const char* name, const std::string& path, Result none, Real real) {
    if (!is_below(path)) return real();
    Call call('q', name, path);
    if (call.fails()) return none;
    Result result = real();
    int problem = errno;
    call.record("", 0, 0, nullptr, 0);
    errno = problem;
    return result;
}

}  // namespace

#define MODE(flags)                            \
    mode_t mode = 0;                           \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {   \
        va_list more;                          \
        va_start(more, flags);                 \
        mode = va_arg(more, mode_t);           \
        va_end(more);                          \
    }

extern "C" {

int open(const char* path, int flags, ...) {
    MODE(flags)
    return open_at(AT_FDCWD, path, flags, mode);
}

int open64(const char* path, int flags, ...) {
    MODE(flags)
    return open_at(AT_FDCWD, path, flags, mode);
}

int openat64(int fd, const char* path, int flags, ...) {
    MODE(flags)
    return open_at(fd, path, flags, mode);
}

ssize_t write(int fd, const void* data, size_t length) {
    std::string path = path_of(fd);
    if (is_below(path)) return put(fd, data, length, -1, path);
    if (fd == STDOUT_FILENO && journal >= 0) {
        pthread_mutex_lock(&one_at_a_time);
        char head[64];
        snprintf(head, sizeof head, "%ld o say 0 0 %zu -\n", calls, length);
        append(head, strlen(head));
        append(data, length);
        append("\n", 1);
        pthread_mutex_unlock(&one_at_a_time);
    }
    return REAL(write)(fd, data, length);
}

ssize_t writev(int fd, const iovec* parts, int count) {
    if (!is_below(path_of(fd)) && fd != STDOUT_FILENO) return REAL(writev)(fd, parts, count);
    std::string all;
    for (int at = 0; at < count; at++)
        all.append(static_cast<const char*>(parts[at].iov_base), parts[at].iov_len);
    return write(fd, all.data(), all.size());
}

ssize_t pwrite64(int fd, const void* data, size_t length, off64_t at) {
    std::string path = path_of(fd);
    return is_below(path) ? put(fd, data, length, at, path) : REAL(pwrite64)(fd, data, length, at);
}

ssize_t copy_file_range(int from, off64_t* at, int to, off64_t* place, size_t length,
                        unsigned flags) {
    if (!is_below(path_of(to))) return REAL(copy_file_range)(from, at, to, place, length, flags);
    char some[4096];
    ssize_t count = REAL(read)(from, some, length < sizeof some ? length : sizeof some);
    if (count <= 0) return count;
    ssize_t written = write(to, some, count);
    // The system does not interrupt it between two files.
    if (written < 0 && errno == EINTR) written = write(to, some, count);
    int problem = errno;
    lseek(from, (written < 0 ? 0 : written) - count, SEEK_CUR);
    errno = problem;
    return written;
}

ssize_t read(int fd, void* data, size_t length) {
    std::string path = path_of(fd);
    if (!is_below(path)) return REAL(read)(fd, data, length);
    Call call('r', "read", path);
    if (call.fails()) return -1;
    call.record(call.is_short ? "!" : "", 0, 0, nullptr, 0);
    return REAL(read)(fd, data, call.cut(length));
}

ssize_t pread64(int fd, void* data, size_t length, off64_t at) {
    std::string path = path_of(fd);
    if (!is_below(path)) return REAL(pread64)(fd, data, length, at);
    Call call('r', "read", path);
    if (call.fails()) return -1;
    call.record(call.is_short ? "!" : "", 0, at, nullptr, 0);
    return REAL(pread64)(fd, data, call.cut(length), at);
}

int fsync(int fd) { return synced(fd, fsync); }

int fdatasync(int fd) { return synced(fd, fdatasync); }

int ftruncate64(int fd, off64_t length) {
    std::string path = path_of(fd);
    if (!is_below(path)) return REAL(ftruncate64)(fd, length);
    Call call('s', "resize", path);
    if (call.fails()) return -1;
    int result = REAL(ftruncate64)(fd, length);
    int problem = errno;
    call.record(result == 0 ? "" : "~", inode(path), length, nullptr, 0);
    errno = problem;
    return result;
}

int mkdir(const char* path, mode_t mode) {
    return change('s', "mkdir", path, "", [&] { return REAL(mkdir)(path, mode); });
}

int rename(const char* from, const char* to) {
    return change('s', "rename", from, to, [&] { return REAL(rename)(from, to); });
}

// Of `mv`, with whole paths.
int renameat2(int fd, const char* from, int to_fd, const char* to, unsigned flags) {
    return change('s', "rename", from, to,
                  [&] { return REAL(renameat2)(fd, from, to_fd, to, flags); });
}

int linkat(int from, const char* old, int to, const char* name, int flags) {
    std::string path = path_at(from, old), made = path_at(to, name);
    auto real = [&] { return REAL(linkat)(from, old, to, name, flags); };
    return change('s', "link", path, made, real);
}

int link(const char* old, const char* name) {
    return linkat(AT_FDCWD, old, AT_FDCWD, name, 0);
}

int unlink(const char* path) {
    return change('d', "remove", path, "", [&] { return REAL(unlink)(path); });
}

int rmdir(const char* path) {
    return change('d', "remove", path, "", [&] { return REAL(rmdir)(path); });
}

int unlinkat(int fd, const char* name, int flags) {
    std::string path = path_at(fd, name);
    return change('d', "remove", path, "", [&] { return REAL(unlinkat)(fd, name, flags); });
}

int statx(int fd, const char* name, int flags, unsigned mask, struct statx* to) {
    std::string path = path_at(fd, name);
    return ask("stat", path, -1, [&] { return REAL(statx)(fd, name, flags, mask, to); });
}

int flock(int fd, int operation) {
    std::string path = path_of(fd), error = setting("FAULTS_FLOCK");
    if (!error.empty() && is_below(path)) {
        errno = atoi(error.c_str());
        return -1;
    }
    return ask("flock", path, -1, [&] { return REAL(flock)(fd, operation); });
}

int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*run)(void*), void* with) {
    static std::atomic<long> started{0};
    std::string most = setting("FAULTS_THREADS");
    if (!most.empty() && started++ >= atol(most.c_str())) return EAGAIN;
    return REAL(pthread_create)(thread, how, run, with);
}

DIR* opendir(const char* path) {
    return ask("opendir", path, static_cast<DIR*>(nullptr), [&] { return REAL(opendir)(path); });
}

dirent64* readdir64(DIR* folder) {
    return ask("readdir", path_of(dirfd(folder)), static_cast<dirent64*>(nullptr),
                 [&] { return REAL(readdir64)(folder); });
}

}  // extern "C"
