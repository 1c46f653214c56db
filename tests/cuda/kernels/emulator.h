// Runs the kernels on a CPU, from the same text: this file, prelude.cu, a file of kernels, and then one
// line EMULATED(name) for each kernel of it, compiled as C++20 to a shared library. It proves indices,
// barriers and arithmetic where there is no GPU; it is slow.
//
// Each thread of a block is a fiber with a stack of its own, which runs until it waits at a barrier or ends;
// a warp runs until it waits for others, and blocks run one after another. Shared memory is static
// (thread_local, so that threads of the host may emulate side by side), dynamic shared memory is filled with
// NaN before each block.
//
// With HAZARDS, hazards.cpp looks at each access for what no result may show: races, and accesses outside of
// buffers.
//
// `emulate` returns 0, or one of Failure. `emulate_backwards` turns the order of blocks, warps and lanes
// around: a kernel that lacks a barrier will likely give other results.

#undef _FORTIFY_SOURCE // its longjmp takes a change of stacks for an attack

// <algorithm> and <memory> would take most of the time that a text compiles.
#include <bit>
#include <cmath>
#include <csetjmp>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include <ucontext.h>

// Each library has its own kernels and machine, however many a process opens.
#pragma GCC visibility push(hidden)

#define EMULATOR
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __shared__ static thread_local
#define DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(emulator::dynamic_shared())

struct Dim3 {
    unsigned x, y, z;
};

inline thread_local Dim3 threadIdx, blockIdx, blockDim, gridDim;

// See hazards.cpp, which is linked where HAZARDS is defined.
#ifdef HAZARDS
extern "C" {
bool hazards_pause();
void hazards_go_on(bool is_on);
void hazards_launch(const char* kernel, unsigned threads);
void hazards_built_in(const void* at, std::size_t bytes);
void hazards_block(unsigned block, const void* shared, std::size_t bytes);
void hazards_thread(unsigned thread, const void* stack, std::size_t bytes);
void hazards_barrier();
void hazards_warp_barrier();
void hazards_in_flight(const void* to, std::size_t bytes);
void hazards_landed(const void* to, std::size_t bytes);
void hazards_read(const void* at, std::size_t bytes);
void hazards_write(void* at, std::size_t bytes);
}
#else
inline bool hazards_pause() { return false; }
inline void hazards_go_on(bool) {}
inline void hazards_launch(const char*, unsigned) {}
inline void hazards_built_in(const void*, std::size_t) {}
inline void hazards_block(unsigned, const void*, std::size_t) {}
inline void hazards_thread(unsigned, const void*, std::size_t) {}
inline void hazards_barrier() {}
inline void hazards_warp_barrier() {}
inline void hazards_in_flight(const void*, std::size_t) {}
inline void hazards_landed(const void*, std::size_t) {}
inline void hazards_read(const void*, std::size_t) {}
inline void hazards_write(void*, std::size_t) {}
#endif

namespace emulator {

// The emulator's own accesses, which no kernel makes.
struct Own {
    const bool was_on = hazards_pause();
    ~Own() { hazards_go_on(was_on); }
};

enum Failure : int {
    UNKNOWN_KERNEL = 1,
    BAD_SIZES = 2,
    // Threads wait at different barriers, or for threads that have ended.
    DEADLOCK = 3,
    // A shuffle whose mask is not all lanes, or of a warp with fewer than 32.
    BAD_WARP = 4,
    // Dynamic shared memory was written behind its end.
    OUT_OF_SHARED = 5,
    // A thread ended before it awaited what it copied.
    COPIES_LEFT = 6,
};

constexpr unsigned LANES = 32;
constexpr std::size_t STACK_BYTES = 128 << 10;
constexpr std::size_t SHARED_BYTES = 227 << 10; // the most of any architecture
constexpr std::size_t GUARD_BYTES = 1 << 10;
constexpr std::size_t EXCHANGED_BYTES = 256; // the most a lane gives

enum class State { Ready, AtBlockBarrier, AtWarpBarrier, Done };

// What a thread copies by cp.async.
struct Copy {
    void* to;
    const void* from; // null: zeros
    int bytes;
};

// Memory that is not initialised, so that a stack takes the pages it uses and no others.
struct Stack {
    char* at = nullptr;

    Stack() = default;
    Stack(Stack&& other) noexcept : at(std::exchange(other.at, nullptr)) {}
    ~Stack() { delete[] at; }
};

struct Fiber {
    std::jmp_buf place;
    State state;
    int barrier;        // the line in the text of the barrier it waits at
    unsigned exchanges; // how many it took part in
    std::vector<Copy> copies; // begun and not awaited
    bool is_begun = false;
    Stack stack;
};

// What one thread of the host emulates with: fibers stay for the next block.
struct Machine {
    std::vector<Fiber> fibers;
    std::jmp_buf scheduler;
    Fiber* current;
    unsigned index; // of the current fiber in its block
    unsigned threads;
    bool is_backwards = false;
    int failure;
    void (*run)(void* kernel, void** arguments);
    void* kernel;
    void** arguments;
    // Two buffers a warp: a lane writes the next one while others still read the last.
    std::vector<unsigned char> exchanged;
    alignas(128) unsigned char shared[SHARED_BYTES + GUARD_BYTES];
};

inline Machine& machine() {
    static thread_local Machine one;
    return one;
}

inline unsigned char* dynamic_shared() {
    const Own own;
    return machine().shared;
}

// ---- Fibers. ----

inline void wait(State state, int barrier) {
    const Own own;
    Machine& m = machine();
    m.current->state = state;
    m.current->barrier = barrier;
    if (_setjmp(m.current->place) == 0) {
        _longjmp(m.scheduler, 1);
    }
}

inline void fiber_main() {
    for (;;) {
        hazards_go_on(false);
        Machine& m = machine();
        m.run(m.kernel, m.arguments);
        if (!m.current->copies.empty()) {
            m.failure = COPIES_LEFT;
        }
        wait(State::Done, 0);
    }
}

// Runs one fiber until it waits. A new one is entered once by ucontext, which is slow, and left for ever.
inline void resume(Machine& m, unsigned index) {
    Fiber& fiber = m.fibers[index];
    m.current = &fiber;
    m.index = index;
    threadIdx = {index % blockDim.x, index / blockDim.x % blockDim.y, index / (blockDim.x * blockDim.y)};
    if (_setjmp(m.scheduler) != 0) {
        hazards_go_on(false);
        return;
    }
    hazards_thread(index, fiber.stack.at, STACK_BYTES);
    if (fiber.is_begun) {
        _longjmp(fiber.place, 1);
    }
    fiber.is_begun = true;
    fiber.stack.at = new char[STACK_BYTES];
    hazards_thread(index, fiber.stack.at, STACK_BYTES);
    static thread_local ucontext_t context, unused;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.at;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, fiber_main, 0);
    swapcontext(&unused, &context);
}

// Lets threads from..to go on if all that are left of them wait at the same barrier; true if it did.
inline bool release(Machine& m, unsigned from, unsigned to, State state) {
    int barrier = -1;
    for (unsigned i = from; i < to; ++i) {
        const Fiber& fiber = m.fibers[i];
        // A block's barrier does not wait for threads that ended. A warp's needs all 32.
        if (fiber.state == State::Done && state == State::AtBlockBarrier) {
            continue;
        }
        if (fiber.state != state || (barrier >= 0 && fiber.barrier != barrier)) {
            return false;
        }
        barrier = fiber.barrier;
    }
    for (unsigned i = from; i < to; ++i) {
        Fiber& fiber = m.fibers[i];
        fiber.state = fiber.state == state ? State::Ready : fiber.state;
    }
    return barrier >= 0;
}

// Runs a warp as far as it can go without others.
inline void run_warp(Machine& m, unsigned warp) {
    const unsigned from = warp * LANES, to = from + LANES < m.threads ? from + LANES : m.threads;
    do {
        for (unsigned i = from; i < to && m.failure == 0; ++i) {
            const unsigned index = m.is_backwards ? to - 1 - (i - from) : i;
            if (m.fibers[index].state == State::Ready) {
                resume(m, index);
            }
        }
    } while (m.failure == 0 && release(m, from, to, State::AtWarpBarrier));
}

inline void run_block(Machine& m, unsigned shared_bytes) {
    for (unsigned i = 0; i < m.threads; ++i) {
        m.fibers[i].state = State::Ready;
        m.fibers[i].exchanges = 0;
    }
    std::memset(m.shared, 0xFF, shared_bytes + GUARD_BYTES);
    hazards_block(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z), m.shared, shared_bytes);
    const unsigned warps = (m.threads + LANES - 1) / LANES;
    do {
        for (unsigned i = 0; i < warps; ++i) {
            run_warp(m, m.is_backwards ? warps - 1 - i : i);
        }
        hazards_barrier();
        unsigned done = 0;
        for (unsigned i = 0; i < m.threads; ++i) {
            done += m.fibers[i].state == State::Done;
        }
        if (m.failure != 0 || done == m.threads) {
            break;
        }
        m.failure = release(m, 0, m.threads, State::AtBlockBarrier) ? 0 : DEADLOCK;
    } while (m.failure == 0);
    const unsigned char* const guard = m.shared + shared_bytes;
    for (std::size_t i = 0; i < GUARD_BYTES && m.failure == 0; ++i) {
        m.failure = guard[i] == 0xFF ? 0 : OUT_OF_SHARED;
    }
    if (m.failure != 0) {
        m.fibers.clear(); // they stand in the midst of a kernel
    }
}

// ---- Warps. ----

inline void need_warp(unsigned mask) {
    const Own own;
    Machine& m = machine();
    if (mask != 0xFFFFFFFF || m.index / LANES * LANES + LANES > m.threads) {
        m.failure = BAD_WARP;
        wait(State::Done, 0);
    }
}

// ---- Kernels by name. ----

// Its arguments are copies of this thread's, as a kernel's are.
template <class... A>
[[gnu::noinline]] void begin(void (*kernel)(A...), A... arguments) {
    hazards_go_on(true);
    kernel(arguments...);
    hazards_go_on(false);
}

template <class... A>
void unpack(void* kernel, void** arguments) {
    auto* const typed = reinterpret_cast<void (*)(A...)>(kernel);
    [&]<std::size_t... I>(std::index_sequence<I...>) {
        begin(typed, *static_cast<std::remove_reference_t<A>*>(arguments[I])...);
    }(std::index_sequence_for<A...>());
}

struct Known {
    const char* name;
    void* kernel;
    void (*run)(void*, void**);
    const Known* next;

    inline static const Known* first = nullptr;

    template <class... A>
    Known(const char* name, void (*kernel)(A...))
        : name(name), kernel(reinterpret_cast<void*>(kernel)), run(unpack<A...>), next(first) {
        first = this;
    }
};

#define EMULATED(name) static const emulator::Known known_##name(#name, name);

// ---- Numbers by bits. ----

inline unsigned short bfloat_bits(float x) {
    const unsigned bits = std::bit_cast<unsigned>(x);
    return x != x ? 0x7FFF : static_cast<unsigned short>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float half_value(unsigned short bits) {
    const unsigned exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = static_cast<float>(fraction) / (1 << 24);
    if (exponent != 0) {
        size = std::bit_cast<float>((exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
    }
    return bits >> 15 != 0 ? -size : size;
}

inline unsigned short half_bits(float x) {
    const unsigned sign = std::signbit(x) ? 0x8000 : 0, bits = std::bit_cast<unsigned>(std::fabs(x));
    unsigned size;
    if (x != x) {
        return 0x7FFF;
    } else if (bits >= 0x477FF000) { // 65520, which rounds to more than the largest
        size = 0x7C00;
    } else if (bits >= 0x38800000) { // 2^-14, the smallest of the normal ones
        size = ((bits + 0xFFF + (bits >> 13 & 1)) >> 13) - (112 << 10);
    } else { // steps of 2^-24, as those of floats from 0.5 on are, so that the sum is rounded to them
        size = std::bit_cast<unsigned>(std::fabs(x) + 0.5f) - std::bit_cast<unsigned>(0.5f);
    }
    return static_cast<unsigned short>(sign | size);
}

} // namespace emulator

// ---- What CUDA has built in. ----

inline void __syncthreads(int line = __builtin_LINE()) {
    emulator::wait(emulator::State::AtBlockBarrier, line);
}

inline void __syncwarp(unsigned mask = 0xFFFFFFFF, int line = __builtin_LINE()) {
    emulator::need_warp(mask);
    emulator::wait(emulator::State::AtWarpBarrier, line);
    hazards_warp_barrier();
}

// Each lane gives a value and gets those of all, which stay until its next exchange: what shuffles and products of a
// warp are made of.
template <class V>
const V* warp_exchange(const V& mine, int line = __builtin_LINE()) {
    static_assert(sizeof(V) <= emulator::EXCHANGED_BYTES && std::is_trivially_copyable_v<V>);
    const emulator::Own own;
    emulator::Machine& m = emulator::machine();
    emulator::need_warp(0xFFFFFFFF);
    const unsigned warp = m.index / emulator::LANES, lane = m.index % emulator::LANES;
    const unsigned buffer = 2 * warp + m.current->exchanges++ % 2;
    unsigned char* const values = &m.exchanged[buffer * emulator::LANES * emulator::EXCHANGED_BYTES];
    std::memcpy(values + lane * sizeof(V), &mine, sizeof(V));
    emulator::wait(emulator::State::AtWarpBarrier, line);
    return reinterpret_cast<const V*>(values);
}

namespace emulator {

template <class V>
V shuffle(unsigned mask, V value, unsigned from, int line) {
    const Own own;
    need_warp(mask);
    const V* const all = warp_exchange(value, line);
    return from < LANES ? all[from] : value;
}

inline unsigned lane() {
    const Own own;
    return machine().index % LANES;
}

} // namespace emulator

template <class V>
V __shfl_sync(unsigned mask, V value, int from, int line = __builtin_LINE()) {
    return emulator::shuffle(mask, value, from % 32u, line);
}

template <class V>
V __shfl_xor_sync(unsigned mask, V value, int bits, int line = __builtin_LINE()) {
    return emulator::shuffle(mask, value, emulator::lane() ^ static_cast<unsigned>(bits), line);
}

template <class V>
V __shfl_down_sync(unsigned mask, V value, unsigned by, int line = __builtin_LINE()) {
    return emulator::shuffle(mask, value, emulator::lane() + by, line);
}

template <class V>
V __shfl_up_sync(unsigned mask, V value, unsigned by, int line = __builtin_LINE()) {
    return emulator::shuffle(mask, value, emulator::lane() - by, line); // wraps around where there is none
}

inline unsigned __ballot_sync(unsigned mask, int is, int line = __builtin_LINE()) {
    const emulator::Own own;
    emulator::need_warp(mask);
    const int* const all = warp_exchange(is, line);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) {
        bits |= static_cast<unsigned>(all[lane] != 0) << lane;
    }
    return bits;
}

inline int __any_sync(unsigned mask, int is, int line = __builtin_LINE()) {
    return __ballot_sync(mask, is, line) != 0;
}

inline int __all_sync(unsigned mask, int is, int line = __builtin_LINE()) {
    return __ballot_sync(mask, is, line) == 0xFFFFFFFF;
}

inline int __popc(unsigned bits) { return std::popcount(bits); }

template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    return a < b ? b : a;
}

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    return b < a ? b : a;
}

#define rsqrtf(x) (1.0f / std::sqrt(x)) // no function: the newest C libraries have one
inline float __fdividef(float x, float y) { return x / y; }
// Never contracted with a sum or a product beside it.
inline float __fmul_rn(float a, float b) {
    volatile float product = a * b;
    return product;
}

inline float __fadd_rn(float a, float b) {
    volatile float sum = a + b;
    return sum;
}

inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }

template <class V>
V __ldg(const V* at) {
    return *at;
}

// ---- Copies to shared memory by cp.async, which attention/mma.cu has in PTX. ----

// They take place when their thread awaits them; until then nothing is there.
inline void begin_copy(void* to, const void* from, int bytes, bool is_real) {
    if (is_real) {
        hazards_read(from, bytes);
    }
    hazards_in_flight(to, bytes);
    const emulator::Own own;
    std::memset(to, 0xFF, bytes);
    emulator::machine().current->copies.push_back({to, is_real ? from : nullptr, bytes});
}

inline void await_copies() {
    const emulator::Own own;
    std::vector<emulator::Copy>& copies = emulator::machine().current->copies;
    for (const emulator::Copy& copy : copies) {
        hazards_landed(copy.to, copy.bytes);
        if (copy.from != nullptr) {
            std::memcpy(copy.to, copy.from, copy.bytes);
        } else {
            std::memset(copy.to, 0, copy.bytes);
        }
    }
    copies.clear();
}

template <int BYTES>
inline void copy(void* to, const void* from, bool is_real) {
    begin_copy(to, from, BYTES, is_real);
}

// ---- The door. Arguments as cuLaunchKernel takes them: where each one lies. ----

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void emulate_backwards(int is_backwards) {
    emulator::machine().is_backwards = is_backwards != 0;
}

EXPORTED int emulate(const char* kernel, const unsigned grid[3], const unsigned block[3],
                     unsigned shared_bytes, void** arguments) {
    using namespace emulator;
    const Known* known = Known::first;
    while (known != nullptr && std::strcmp(known->name, kernel) != 0) {
        known = known->next;
    }
    if (known == nullptr) {
        return UNKNOWN_KERNEL;
    }
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    const unsigned long long blocks = 1ULL * grid[0] * grid[1] * grid[2];
    const unsigned long long threads = 1ULL * block[0] * block[1] * block[2];
    const bool is_grid = blocks > 0 && grid[0] < 1U << 31 && grid[1] < 1U << 16 && grid[2] < 1U << 16;
    if (!is_grid || threads == 0 || threads > 1024 || shared_bytes > SHARED_BYTES) {
        return BAD_SIZES;
    }
    Machine& m = machine();
    m.threads = static_cast<unsigned>(threads);
    m.failure = 0;
    m.run = known->run;
    m.kernel = known->kernel;
    m.arguments = arguments;
    hazards_launch(kernel, m.threads);
    for (const Dim3* one : {&threadIdx, &blockIdx, &blockDim, &gridDim}) {
        hazards_built_in(one, sizeof *one);
    }
    const std::size_t warps = (threads + LANES - 1) / LANES;
    m.exchanged.resize(2 * warps * LANES * EXCHANGED_BYTES);
    if (m.fibers.size() < threads) {
        m.fibers.resize(threads);
    }
    for (unsigned long long i = 0; i < blocks && m.failure == 0; ++i) {
        const unsigned long long index = m.is_backwards ? blocks - 1 - i : i;
        blockIdx = {static_cast<unsigned>(index % grid[0]), static_cast<unsigned>(index / grid[0] % grid[1]),
                    static_cast<unsigned>(index / grid[0] / grid[1])};
        run_block(m, shared_bytes);
    }
    return m.failure;
}
