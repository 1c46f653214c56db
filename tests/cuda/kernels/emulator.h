// Runs the kernels on a CPU, from the same text: this file, prelude.cu, a file of kernels, and then one
// line EMULATED(name) for each kernel of it, compiled as C++20 to a shared library. It proves indices,
// barriers and arithmetic where there is no GPU; it is slow.
//
// Each thread of a block is a fiber with a stack of its own, which runs until it waits at a barrier or ends, and
// then hands over to the next one of its warp; a warp runs until it waits for others, and blocks run one after
// another. Shared memory is static (thread_local, so that threads of the host may emulate side by side), dynamic
// shared memory is filled with NaN before each block.
//
// With HAZARDS, hazards.cpp looks at each access for what no result may show: races, and accesses outside of
// buffers.
//
// `emulate` returns 0, or one of Failure. `emulate_backwards` turns the order of blocks, warps and lanes
// around: a kernel that lacks a barrier will likely give other results.

// <algorithm> and <memory> would take most of the time that a text compiles.
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
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

#define threadIdx (emulator::self().thread)
#define blockIdx (emulator::self().machine->block)
#define blockDim (emulator::self().machine->block_size)
#define gridDim (emulator::self().machine->grid_size)

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

// Where a fiber or the scheduler goes on, by the compiler's own setjmp: it is faster than the C library's, and may
// change stacks.
using Place = void* [5];

struct Machine;

// A thread of a block. It lies at the beginning of its stack: the stack's pointer leads to it.
struct Fiber {
    Machine* machine;
    unsigned index; // in its block
    Dim3 thread;
    State state;
    int barrier;        // the line in the text of the barrier it waits at
    unsigned exchanges; // how many it took part in
    std::vector<Copy> copies; // begun and not awaited
    Place place;
};

inline Fiber& self() {
    const auto here = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
    return *reinterpret_cast<Fiber*>(here & ~(STACK_BYTES - 1));
}

// A fiber and its stack, which is not initialised: it takes the pages that are used, and no others.
struct Owned {
    static constexpr std::align_val_t ALIGNED{STACK_BYTES};

    Fiber* at = new (operator new(STACK_BYTES, ALIGNED)) Fiber{};

    Owned() = default;
    Owned(Owned&& other) noexcept : at(std::exchange(other.at, nullptr)) {}
    ~Owned() {
        if (at != nullptr) {
            at->~Fiber();
            operator delete(at, ALIGNED);
        }
    }
};

// What one thread of the host emulates with: fibers stay for the next block.
struct Machine {
    std::vector<Owned> fibers;
    Place scheduler;
    Dim3 block, block_size, grid_size;
    unsigned threads;
    unsigned from, to; // the threads of the warp that runs
    bool is_backwards = false;
    int failure;
    void (*run)(void* kernel, void** arguments);
    void* kernel;
    void** arguments;
    // Two buffers a warp: a lane writes the next one while others still read the last.
    std::vector<unsigned char> exchanged;
    alignas(128) unsigned char shared[SHARED_BYTES + GUARD_BYTES];

    Fiber& fiber(unsigned index) { return *fibers[index].at; }
};

inline Machine& machine() {
    static thread_local Machine one;
    return one;
}

inline unsigned char* dynamic_shared() { return self().machine->shared; }

// ---- Fibers. ----

// The next thread of the running warp that is ready, from the `turn`-th on; null if there is none.
inline Fiber* ready(Machine& m, unsigned turn) {
    for (; m.from + turn < m.to && m.failure == 0; ++turn) {
        Fiber& fiber = m.fiber(m.is_backwards ? m.to - 1 - turn : m.from + turn);
        if (fiber.state == State::Ready) {
            return &fiber;
        }
    }
    return nullptr;
}

[[noreturn, gnu::noinline]] inline void enter(Fiber& fiber) {
    hazards_thread(fiber.index, &fiber, STACK_BYTES);
    __builtin_longjmp(fiber.place, 1);
}

// Hands over to the next thread of the warp, or to the scheduler.
[[noreturn, gnu::noinline]] inline void leave(Fiber& fiber) {
    Machine& m = *fiber.machine;
    const unsigned turn = m.is_backwards ? m.to - 1 - fiber.index : fiber.index - m.from;
    if (Fiber* const next = ready(m, turn + 1)) {
        enter(*next);
    }
    __builtin_longjmp(m.scheduler, 1);
}

inline void wait(State state, int barrier) {
    const Own own;
    Fiber& fiber = self();
    fiber.state = state;
    fiber.barrier = barrier;
    if (__builtin_setjmp(fiber.place) == 0) {
        leave(fiber);
    }
}

inline void fiber_main() {
    for (;;) {
        wait(State::Done, 0);
        hazards_go_on(false);
        Fiber& fiber = self();
        Machine& m = *fiber.machine;
        m.run(m.kernel, m.arguments);
        if (!fiber.copies.empty()) {
            m.failure = COPIES_LEFT;
        }
    }
}

// Makes one more fiber. It is entered once by ucontext, which is slow, and waits for its first block.
inline void add_fiber(Machine& m) {
    const auto index = static_cast<unsigned>(m.fibers.size());
    Fiber& fiber = *m.fibers.emplace_back().at;
    fiber.machine = &m;
    fiber.index = index;
    m.from = m.to = index;
    hazards_thread(index, &fiber, STACK_BYTES);
    static thread_local ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = &fiber + 1;
    context.uc_stack.ss_size = STACK_BYTES - sizeof(Fiber);
    context.uc_link = nullptr;
    makecontext(&context, fiber_main, 0);
    if (__builtin_setjmp(m.scheduler) == 0) {
        setcontext(&context);
    }
}

// Runs a fiber until it waits, and those that it hands over to.
inline void resume(Machine& m, Fiber& fiber) {
    if (__builtin_setjmp(m.scheduler) == 0) {
        enter(fiber);
    }
    hazards_go_on(false);
}

// Lets threads from..to go on if all that are left of them wait at the same barrier; true if it did.
inline bool release(Machine& m, unsigned from, unsigned to, State state) {
    int barrier = -1;
    for (unsigned i = from; i < to; ++i) {
        const Fiber& fiber = m.fiber(i);
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
        Fiber& fiber = m.fiber(i);
        fiber.state = fiber.state == state ? State::Ready : fiber.state;
    }
    return barrier >= 0;
}

// Runs a warp as far as it can go without others.
inline void run_warp(Machine& m, unsigned warp) {
    m.from = warp * LANES;
    m.to = m.from + LANES < m.threads ? m.from + LANES : m.threads;
    do {
        if (Fiber* const first = ready(m, 0)) {
            resume(m, *first);
        }
    } while (m.failure == 0 && release(m, m.from, m.to, State::AtWarpBarrier));
}

inline void run_block(Machine& m, unsigned shared_bytes) {
    for (unsigned i = 0; i < m.threads; ++i) {
        m.fiber(i).state = State::Ready;
        m.fiber(i).exchanges = 0;
    }
    std::memset(m.shared, 0xFF, shared_bytes + GUARD_BYTES);
    const Dim3 at = m.block, of = m.grid_size;
    hazards_block(at.x + of.x * (at.y + of.y * at.z), m.shared, shared_bytes);
    const unsigned warps = (m.threads + LANES - 1) / LANES;
    do {
        for (unsigned i = 0; i < warps; ++i) {
            run_warp(m, m.is_backwards ? warps - 1 - i : i);
        }
        hazards_barrier();
        unsigned done = 0;
        for (unsigned i = 0; i < m.threads; ++i) {
            done += m.fiber(i).state == State::Done;
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
    Machine& m = *self().machine;
    if (mask != 0xFFFFFFFF || m.to - m.from < LANES) {
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
    emulator::need_warp(0xFFFFFFFF);
    emulator::Fiber& fiber = emulator::self();
    emulator::Machine& m = *fiber.machine;
    const unsigned warp = fiber.index / emulator::LANES, lane = fiber.index % emulator::LANES;
    const unsigned buffer = 2 * warp + fiber.exchanges++ % 2;
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

inline unsigned lane() { return self().index % LANES; }

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
    emulator::self().copies.push_back({to, is_real ? from : nullptr, bytes});
}

inline void await_copies() {
    const emulator::Own own;
    std::vector<emulator::Copy>& copies = emulator::self().copies;
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
    const unsigned long long blocks = 1ULL * grid[0] * grid[1] * grid[2];
    const unsigned long long threads = 1ULL * block[0] * block[1] * block[2];
    const bool is_grid = blocks > 0 && grid[0] < 1U << 31 && grid[1] < 1U << 16 && grid[2] < 1U << 16;
    if (!is_grid || threads == 0 || threads > 1024 || shared_bytes > SHARED_BYTES) {
        return BAD_SIZES;
    }
    Machine& m = machine();
    m.grid_size = {grid[0], grid[1], grid[2]};
    m.block_size = {block[0], block[1], block[2]};
    m.threads = static_cast<unsigned>(threads);
    m.failure = 0;
    m.run = known->run;
    m.kernel = known->kernel;
    m.arguments = arguments;
    hazards_launch(kernel, m.threads);
    for (const Dim3* one : {&m.block, &m.block_size, &m.grid_size}) {
        hazards_built_in(one, sizeof *one);
    }
    const std::size_t warps = (threads + LANES - 1) / LANES;
    m.exchanged.resize(2 * warps * LANES * EXCHANGED_BYTES);
    while (m.fibers.size() < threads) {
        add_fiber(m);
    }
    for (unsigned i = 0; i < m.threads; ++i) {
        m.fiber(i).thread = {i % block[0], i / block[0] % block[1], i / (block[0] * block[1])};
    }
    for (unsigned long long i = 0; i < blocks && m.failure == 0; ++i) {
        const unsigned long long index = m.is_backwards ? blocks - 1 - i : i;
        m.block = {static_cast<unsigned>(index % grid[0]), static_cast<unsigned>(index / grid[0] % grid[1]),
                   static_cast<unsigned>(index / grid[0] / grid[1])};
        run_block(m, shared_bytes);
    }
    return m.failure;
}
