// Products of a warpgroup on tensor cores. They have 64 rows: each warp has 16 of them, as a Left and as Sums.

#ifdef HAS_WGMMA

constexpr int WARPGROUP = 4 * WARP;

// Describes a matrix in shared memory whose rows have 128 bytes, swizzled, and lie side by side (PTX ISA, "Matrix
// Descriptor Format"; CUTLASS, `GmmaDescriptor`).
struct Descriptor {
    unsigned address; // in 16 bytes, before it is swizzled

    __device__ unsigned long long bits() const {
        constexpr unsigned long long SWIZZLED_128 = 1ULL << 62, EIGHT_ROWS = 1024 >> 4, UNUSED = 1;
        return SWIZZLED_128 | EIGHT_ROWS << 32 | UNUSED << 16 | (address & 0x3FFF);
    }
};

#ifdef EMULATOR

// An element of a described matrix, which has rows of 64 elements.
inline const T& described(Descriptor of, int row, int place) {
    const unsigned begin = (of.bits() & 0x3FFF) << 4, eight_rows = (of.bits() >> 32 & 0x3FFF) << 4;
    const unsigned at = begin + row / 8 * eight_rows + row % 8 * 128 + place * sizeof(T);
    return *reinterpret_cast<const T*>(emulator::dynamic_shared() + (at ^ (at >> 7 & 7) << 4));
}

// Of `rows` × `pieces` pieces of 16 bytes of a described matrix, those that a lane reads.
inline void read_described(std::vector<const void*>& read, Descriptor of, int first_row, int rows, int pieces) {
    const int count = rows * pieces / WARP;
    for (int i = threadIdx.x % WARP * count; i < static_cast<int>(threadIdx.x % WARP + 1) * count; ++i) {
        read.push_back(&described(of, first_row + i / pieces, i % pieces * 8));
    }
}

// Begins sums (+)= a b, for the 16 rows of a warp. `left`: an element of them. `read`: what was read of a.
template <class A>
void begin_product(const emulator::Own& own, Sum (&sums)[8], const A& left, Descriptor b, bool is_turned, bool add,
                   std::vector<const void*> read) {
    // Sixteen rows with 64 columns, or, turned, 64 rows of which it takes sixteen elements.
    read_described(read, b, 0, is_turned ? 16 : 64, is_turned ? 8 : 2);
    Sum products[8] = {};
    for (int i = 0; i < 32; ++i) {
        const int row = threadIdx.x % WARP / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const float right = get(is_turned ? described(b, k, column) : described(b, column, k));
            products[i / 4].of[i % 4] += left(row, k) * right;
        }
    }
    emulator::begin_product(own, read, [=, &sums] {
        for (int i = 0; i < 32; ++i) {
            float& sum = sums[i / 4].of[i % 4];
            sum = (add ? sum : 0) + products[i / 4].of[i % 4];
        }
    });
}

template <bool TURNED>
void multiply(Sum (&sums)[8], const Left& a, Descriptor b, bool add) {
    Left lanes[WARP];
    warp_exchange(a, lanes);
    const emulator::Own own;
    const auto left = [&](int row, int k) {
        const unsigned bits = lanes[row % 8 * 4 + k % 8 / 2].of[k / 8 * 2 + row / 8];
        return get(T{static_cast<unsigned short>(bits >> 16 * (k % 2))});
    };
    begin_product(own, sums, left, b, TURNED, add, {});
}

template <bool TURNED>
void multiply(Sum (&sums)[8], Descriptor a, Descriptor b, bool add) {
    const emulator::Own own;
    const int first = threadIdx.x % WARPGROUP / WARP * 16;
    std::vector<const void*> read;
    read_described(read, a, first, 16, 2);
    begin_product(own, sums, [&](int row, int k) { return get(described(a, first + row, k)); }, b, TURNED, add, read);
}

inline void begin_products() {}
inline void end_products() { emulator::end_products(); }

// Waits for all but the `LEFT` that were begun last.
template <int LEFT>
void await_products() {
    emulator::await_products(LEFT);
}

inline void show_to_products() { hazards_fence(); }

template <class Registers>
void hold(Registers&) {}

#else

#define SUM(i) "+f"(sums[i].of[0]), "+f"(sums[i].of[1]), "+f"(sums[i].of[2]), "+f"(sums[i].of[3])
#if ELEMENT == 16
#define WGMMA "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
#else
#define WGMMA "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
#endif
#define ALL_SUMS                                                          \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "

// Begins sums (+)= a b. TURNED: b's rows lie one after another, as the product sums them; else its columns do.
template <bool TURNED>
__device__ inline void multiply(Sum (&sums)[8], const Left& a, Descriptor b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n" WGMMA ALL_SUMS
                 "{%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"
                 : SUM(0), SUM(1), SUM(2), SUM(3), SUM(4), SUM(5), SUM(6), SUM(7)
                 : "r"(a.of[0]), "r"(a.of[1]), "r"(a.of[2]), "r"(a.of[3]), "l"(b.bits()), "r"(int(add)),
                   "n"(int(TURNED)));
}

template <bool TURNED>
__device__ inline void multiply(Sum (&sums)[8], Descriptor a, Descriptor b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n" WGMMA ALL_SUMS
                 "%32, %33, add, 1, 1, 0, %35;\n}"
                 : SUM(0), SUM(1), SUM(2), SUM(3), SUM(4), SUM(5), SUM(6), SUM(7)
                 : "l"(a.bits()), "l"(b.bits()), "r"(int(add)), "n"(int(TURNED)));
}

// Registers that were written before are read by the products that begin now.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all but the `LEFT` that were begun last.
template <int LEFT>
__device__ inline void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Products that begin behind the next barrier see what this thread has written to shared memory.
__device__ inline void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The compiler moves no access of these registers across this.
__device__ inline void hold(float& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ inline void hold(unsigned& x) { asm volatile("" : "+r"(x)::"memory"); }

template <class X, int N>
__device__ inline void hold(X (&all)[N]) {
#pragma unroll
    for (X& one : all) {
        hold(one);
    }
}

__device__ inline void hold(Sum& x) { hold(x.of); }
__device__ inline void hold(Left& x) { hold(x.of); }

#endif

#endif
