// Numbers that are packed before a copy to the host and unpacked behind a copy from it, and the positive inputs of a
// ReLU. All bits are those of the CPU (tensor/packed.rs, tensor/int8.rs, devices/cpu/positive.rs).

constexpr int WARPS = 8; // of a block of 256 threads

// A float rounded to bfloat16, to nearest even. The instruction for it is of sm_80 and newer.
__device__ inline unsigned short bfloat_of(float x) {
    const unsigned bits = __float_as_uint(x);
    const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    return static_cast<unsigned short>(is_nan ? bits >> 16 | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// y = x, rounded.
// launch: grid (ceil(n / 1024)), block (256)
extern "C" __global__ void pack_bfloats(unsigned short* y, const float* x, long long n) {
    const long long at = 4 * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
    if (at >= n) {
        return;
    }
    const int count = static_cast<int>(min(n - at, 4LL));
    const Four values = read(x + at, count);
    Packed<unsigned short> all;
    for (int i = 0; i < 4; ++i) {
        all.of[i] = bfloat_of(values.of[i]);
    }
    if (is_packed(y + at, count)) {
        write_once(reinterpret_cast<Packed<unsigned short>*>(y + at), all);
    } else {
        for (int i = 0; i < 4; ++i) {
            if (i < count) {
                y[at + i] = all.of[i];
            }
        }
    }
}

// y = x.
// launch: grid (ceil(n / 256)), block (256)
extern "C" __global__ void unpack_bfloats(float* y, const unsigned short* x, long long n) {
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < n) {
        y[at] = __uint_as_float(static_cast<unsigned>(x[at]) << 16);
    }
}

// Rows of x, (rows, columns), in bytes. A packed row has `words` floats: a scale for each `size` numbers, then a
// multiple of it for each number, a byte. A scale is NaN if one of its numbers is not finite. A warp has the numbers
// of one scale at a time.
// launch: grid (rows), block (256)
extern "C" __global__ void pack_int8(float* packed, const T* x, int rows, int columns, int words, int size) {
    const int lane = threadIdx.x % WARP, scales = (columns + size - 1) / size;
    packed += static_cast<long long>(blockIdx.x) * words;
    x += static_cast<long long>(blockIdx.x) * columns;
    signed char* const multiples = reinterpret_cast<signed char*>(packed + scales);
    for (int index = threadIdx.x / WARP; index < scales; index += WARPS) {
        const int from = index * size, to = min(from + size, columns);
        float most = 0.0f;
        bool is_odd = false;
        for (int at = from + lane; at < to; at += WARP) {
            const float magnitude = fabsf(get(x[at]));
            is_odd |= !(magnitude < infinity());
            most = fmaxf(most, magnitude);
        }
        most = warp_max(most);
        is_odd = __any_sync(FULL_MASK, is_odd);
        const float scale = is_odd ? __int_as_float(0x7FC00000) : most / 127.0f;
        const float per_scale = scale > 0.0f ? 1.0f / scale : 0.0f;
        for (int at = from + lane; at < to; at += WARP) {
            // The reciprocal of a scale below about 3e-39 is infinite, so the numbers are divided.
            const float number = get(x[at]);
            const float ratio = rintf(per_scale < infinity() ? number * per_scale : number / scale);
            // What is not finite times 0 is NaN, and becomes 0.
            multiples[at] = static_cast<signed char>(ratio == ratio ? fminf(fmaxf(ratio, -128.0f), 127.0f) : 0.0f);
        }
        if (lane == 0) {
            packed[index] = scale;
        }
    }
}

// y = the numbers of packed rows.
// launch: grid (rows), block (256)
extern "C" __global__ void unpack_int8(T* y, const float* packed, int rows, int columns, int words, int size) {
    packed += static_cast<long long>(blockIdx.x) * words;
    y += static_cast<long long>(blockIdx.x) * columns;
    const signed char* const multiples = reinterpret_cast<const signed char*>(packed + (columns + size - 1) / size);
    for (int at = threadIdx.x; at < columns; at += blockDim.x) {
        set(y[at], static_cast<float>(multiples[at]) * packed[at / size]);
    }
}

// The number of positive numbers before this thread's, of those that the block's threads have, and the number of all.
struct Before {
    int mine, all;
};

// `bits` has a bit for each lane of the warp whose number is positive. All threads of the block must call it.
__device__ inline Before count_before(unsigned bits) {
    __shared__ int counts[WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    __syncthreads(); // the counts of the call before have been read
    if (lane == 0) {
        counts[warp] = __popc(bits);
    }
    __syncthreads();
    Before before = {__popc(bits & ((1u << lane) - 1)), 0};
    for (int i = 0; i < WARPS; ++i) {
        before.mine += i < warp ? counts[i] : 0;
        before.all += counts[i];
    }
    return before;
}

// The positive numbers of x, (rows, columns). A packed row has `words` floats: the count of positive numbers, a bit
// for each number, and the first `room` of the positive ones.
// launch: grid (rows), block (256)
extern "C" __global__ void pack_positive(float* packed, const T* x, int rows, int columns, int words,
                                         int room) {
    packed += static_cast<long long>(blockIdx.x) * words;
    x += static_cast<long long>(blockIdx.x) * columns;
    T* const values = reinterpret_cast<T*>(packed + 1 + (columns + WARP - 1) / WARP);
    int found = 0;
    for (int first = 0; first < columns; first += blockDim.x) {
        const int at = first + threadIdx.x;
        const bool is_positive = at < columns && get(x[at]) > 0.0f;
        const unsigned bits = __ballot_sync(FULL_MASK, is_positive);
        if (at % WARP == 0 && at < columns) {
            packed[1 + at / WARP] = __uint_as_float(bits);
        }
        const Before before = count_before(bits);
        if (is_positive && found + before.mine < room) {
            values[found + before.mine] = x[at];
        }
        found += before.all;
    }
    if (threadIdx.x == 0) {
        packed[0] = __int_as_float(found);
    }
}

// y = max(x, 0) of what was packed; with no room, 1 for a positive number. Where a row had more positive numbers than
// room, `overflowed` becomes 1, and y is to be thrown away.
// launch: grid (rows), block (256)
extern "C" __global__ void unpack_positive(T* y, int* overflowed, const float* packed, int rows, int columns,
                                           int words, int room) {
    packed += static_cast<long long>(blockIdx.x) * words;
    y += static_cast<long long>(blockIdx.x) * columns;
    const T* const values = reinterpret_cast<const T*>(packed + 1 + (columns + WARP - 1) / WARP);
    int found = 0;
    for (int first = 0; first < columns; first += blockDim.x) {
        const int at = first + threadIdx.x;
        const unsigned bits = at < columns ? __float_as_uint(packed[1 + at / WARP]) : 0;
        const bool is_positive = bits >> at % WARP & 1;
        const Before before = count_before(bits);
        const int index = found + before.mine;
        if (at < columns) {
            set(y[at], !is_positive ? 0.0f : room == 0 ? 1.0f : index < room ? get(values[index]) : 0.0f);
        }
        found += before.all;
    }
    if (threadIdx.x == 0 && room > 0 && __float_as_int(packed[0]) > room) {
        *static_cast<volatile int*>(overflowed) = 1; // several blocks may write it at once
    }
}
