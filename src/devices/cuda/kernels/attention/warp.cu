// What products of a warp share on all architectures: sums, packed elements, copies to shared memory.

#if ELEMENT != 32

// A lane's elements of a sum of 16 × 8: two neighbours of one row, and two of another (see mma and quad_pairs).
struct Sum {
    float of[4];
};

// Rows of channels in shared memory. They are eight elements longer than a head, so that reads of eight rows have no
// bank conflict.
template <int HEAD, int ROWS>
struct alignas(16) Tile {
    static constexpr int PITCH = HEAD + 8;

    T of[ROWS * PITCH];

    __device__ static constexpr int place(int row, int channel) { return row * PITCH + channel; }
};

#ifdef EMULATOR

inline unsigned pack(float low, float high) {
    return static_cast<unsigned>(put(high).bits) << 16 | put(low).bits;
}

// The elements of a lane that the other lanes of the emulated warp read for a product.
template <class Left, class Right>
struct Shown {
    float a[2 * std::size(Left{}.of)], b[2 * std::size(Right{}.of)];
};

template <class Left, class Right>
Shown<Left, Right> show(const Left& a, const Right& b) {
    const auto element = [](const unsigned* registers, int index) {
        return get(T{static_cast<unsigned short>(registers[index / 2] >> 16 * (index % 2))});
    };
    Shown<Left, Right> shown;
    for (int i = 0; i < static_cast<int>(std::size(shown.a)); ++i) {
        shown.a[i] = element(a.of, i);
    }
    for (int i = 0; i < static_cast<int>(std::size(shown.b)); ++i) {
        shown.b[i] = element(b.of, i);
    }
    return shown;
}

inline float power_of_two(float x) { return exp2f(x); }

#else

// Two elements in a register, the first in the lower half.
__device__ inline unsigned pack(float low, float high) {
    unsigned packed;
#if ELEMENT == 16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#elif __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    packed = static_cast<unsigned>(put(high).bits) << 16 | put(low).bits;
#endif
    return packed;
}

__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline unsigned shared_address(const void* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

#if __CUDA_ARCH__ >= 800

// Begins to copy 4 or 16 bytes to shared memory, or zeros if `is_real` is false.
template <int BYTES>
__device__ inline void copy(void* to, const void* from, bool is_real) {
    const unsigned address = shared_address(to);
    const int real = is_real ? BYTES : 0;
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :
                     : "r"(address), "l"(from), "r"(real)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                     :
                     : "r"(address), "l"(from), "r"(real)
                     : "memory");
    }
}

__device__ inline void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#else

// Without cp.async, the copy is done at once.
template <int BYTES>
__device__ inline void copy(void* to, const void* from, bool is_real) {
    using Words = Packed<unsigned, BYTES / 4>;
    *static_cast<Words*>(to) = is_real ? *static_cast<const Words*>(from) : Words{};
}

__device__ inline void await_copies() {}

#endif

#endif

#endif
