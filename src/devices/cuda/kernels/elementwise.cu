// Element-wise kernels: zeros, casts, dropout, activation functions and gates; and sums of columns and of partial sums.

// The largest float.
constexpr float MOST = 3.40282347e38f;

template <class E>
__device__ inline void clear_all(E* y, long long n) {
    const long long at = 4 * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
    if (at < n) {
        write(y + at, Four{}, static_cast<int>(min(n - at, 4LL)));
    }
}

// y = 0.
// launch: grid (ceil(n / 1024)), block (256)
extern "C" __global__ void clear(T* y, long long n) { clear_all(y, n); }

// launch: grid (ceil(n / 1024)), block (256)
extern "C" __global__ void clear_floats(float* y, long long n) { clear_all(y, n); }

template <class To, class From>
__device__ inline void cast_all(To* y, const From* x, long long n) {
    const long long at = 4 * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
    if (at < n) {
        const int count = static_cast<int>(min(n - at, 4LL));
        write(y + at, read(x + at, count), count);
    }
}

// y = x.
// launch: grid (ceil(n / 1024)), block (256)
extern "C" __global__ void to_floats(float* y, const T* x, long long n) { cast_all(y, x, n); }

// launch: grid (ceil(n / 1024)), block (256)
extern "C" __global__ void from_floats(T* y, const float* x, long long n) { cast_all(y, x, n); }

// y = factor by x; y may be x, and by may be null.
// launch: grid (ceil(n / 1024)), block (256)
extern "C" __global__ void scale(T* y, const T* x, long long n, float factor, const T* by) {
    const long long at = 4 * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
    if (by != nullptr) {
        factor *= get(*by);
    }
    if (at < n) {
        const int count = static_cast<int>(min(n - at, 4LL));
        Four value = read(x + at, count);
        for (int i = 0; i < 4; ++i) {
            value.of[i] *= factor;
        }
        write(y + at, value, count);
    }
}

// y = x, in words of four bytes. x may lie in pinned memory of the host.
// launch: grid (ceil(n / 256)), block (256)
extern "C" __global__ void copy_words(unsigned* y, const unsigned* x, int n) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n) {
        y[at] = x[at];
    }
}

// Writes a mark if a number is not finite, unless there is a mark of the same step already. The upper half of a mark
// is the step's number. Several threads may write at once: all write the same mark.
// launch: grid (ceil(n / 1024)), block (256)
extern "C" __global__ void mark_non_finite(long long* marked, const T* x, long long n, long long mark) {
    const long long at = 4 * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
    if (at >= n) {
        return;
    }
    const int count = static_cast<int>(min(n - at, 4LL));
    const Four values = read(x + at, count);
    bool finite = true;
    for (int i = 0; i < 4; ++i) {
        finite &= fabsf(values.of[i]) <= MOST;
    }
    if (!finite && *marked >> 32 != mark >> 32) {
        *marked = mark;
    }
}

template <class E>
__device__ inline void add_bias_all(E* y, const T* bias, int columns, int stride) {
    const int column = my_column(), count = columns - column;
    if (count <= 0) {
        return;
    }
    y += static_cast<long long>(blockIdx.x) * stride + column;
    Four value = read(y, count);
    const Four more = read(bias + column, count);
    for (int i = 0; i < 4; ++i) {
        value.of[i] += more.of[i];
    }
    write(y, value, count);
}

// y += bias. y: (rows, columns), rows `stride` apart; bias: (columns).
// launch: grid (rows, ceil(columns / 1024)), block (threads(columns))
extern "C" __global__ void add_bias(T* y, const T* bias, int rows, int columns, int stride) {
    add_bias_all(y, bias, columns, stride);
}

// launch: grid (rows, ceil(columns / 1024)), block (threads(columns))
extern "C" __global__ void add_bias_to_floats(float* y, const T* bias, int rows, int columns, int stride) {
    add_bias_all(y, bias, columns, stride);
}

// y = a + dropout(x), without `a` if that is null; y may be either. (rows, channels).
// launch: grid (rows, ceil(channels / (256 wide))), block (threads(4 channels / wide))
extern "C" __global__ void drop(T* y, const T* x, const T* a, const int* starts, int sequences,
                                int rows, int channels, Dropout d) {
    const int row = blockIdx.x, column = my_column<WIDE>(), count = channels - column;
    if (count <= 0) {
        return;
    }
    const long long at = static_cast<long long>(row) * channels + column;
    Some<WIDE> value = read<WIDE>(x + at, count);
    apply_mask(value, d, starts, sequences, rows, row, column);
    if (a != nullptr) {
        const Some<WIDE> other = read<WIDE>(a + at, count);
        for (int i = 0; i < WIDE; ++i) {
            value.of[i] += other.of[i];
        }
    }
    write(y + at, value, count);
}

enum Form { GELU_ERF, GELU_TANH, SILU, RELU, TANH };

constexpr float ROOT_HALF = 0.70710678f;
constexpr float ROOT_2_OVER_PI = 0.79788456f;
constexpr float ONE_OVER_ROOT_2_PI = 0.39894228f;
constexpr float CUBIC = 0.044715f;

// f(x) and f'(x). The compiler drops the one that a kernel does not use.
struct Point {
    float value, slope;
};

// 1 / (1 + exp(-x)). This division is off by two units in the last place at most, and faster than the exact one;
// below -87.3 it gives 0 for less than 1.2e-38.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

template <int FORM>
__device__ inline Point at_point(float x) {
    if constexpr (FORM == GELU_ERF) {
        const float share = 0.5f * (1.0f + erff(x * ROOT_HALF));
        return {x * share, share + x * (ONE_OVER_ROOT_2_PI * expf(-0.5f * x * x))};
    } else if constexpr (FORM == GELU_TANH) {
        const float t = tanhf(ROOT_2_OVER_PI * (x + CUBIC * x * x * x));
        const float inner = ROOT_2_OVER_PI * (1.0f + 3.0f * CUBIC * x * x);
        return {0.5f * x * (1.0f + t), 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner};
    } else if constexpr (FORM == SILU) {
        const float s = sigmoid(x);
        return {x * s, s * (1.0f + x * (1.0f - s))};
    } else if constexpr (FORM == RELU) {
        return {fmaxf(x, 0.0f), x > 0.0f ? 1.0f : 0.0f};
    } else {
        const float t = tanhf(x);
        return {t, 1.0f - t * t};
    }
}

template <int FORM, int N, class Use>
__device__ inline void at_points_of(const Some<N>& x, const Use& use) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        use(i, at_point<FORM>(x.of[i]));
    }
}

// Calls `use(i, point)` for each neighbour. The branch on the form is outside of the loop.
template <int N, class Use>
__device__ inline void at_points(const Some<N>& x, int form, const Use& use) {
    switch (form) {
    case GELU_ERF:
        return at_points_of<GELU_ERF>(x, use);
    case GELU_TANH:
        return at_points_of<GELU_TANH>(x, use);
    case SILU:
        return at_points_of<SILU>(x, use);
    case RELU:
        return at_points_of<RELU>(x, use);
    default:
        return at_points_of<TANH>(x, use);
    }
}

// y = f(x).
// launch: grid (ceil(n / (256 wide))), block (256)
extern "C" __global__ void activate(T* y, const T* x, long long n, int form) {
    const long long at = WIDE * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
    const int count = static_cast<int>(min(n - at, static_cast<long long>(WIDE)));
    if (count <= 0) {
        return;
    }
    Some<WIDE> value = read<WIDE>(x + at, count);
    at_points(value, form, [&](int i, Point point) { value.of[i] = point.value; });
    write(y + at, value, count);
}

// dx = dx f'(x). dx holds dy before.
// launch: grid (ceil(n / (256 wide))), block (256)
extern "C" __global__ void activate_backward(T* dx, const T* x, long long n, int form) {
    const long long at = WIDE * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
    const int count = static_cast<int>(min(n - at, static_cast<long long>(WIDE)));
    if (count <= 0) {
        return;
    }
    const Some<WIDE> value = read<WIDE>(x + at, count);
    Some<WIDE> d = read<WIDE>(dx + at, count);
    at_points(value, form, [&](int i, Point point) { d.of[i] *= point.slope; });
    write(dx + at, d, count);
}

// dx = dx f'(x) for neighbours in some rows; returns the sums of the rounded dx over the rows. Four rows are loaded
// before the first is computed, so that loads do not wait for each other.
template <bool PACKED>
__device__ inline Some<WIDE> activate_rows(T* dx, const T* x, int rows, int columns, int count, int form) {
    constexpr int TOGETHER = 4;
    Some<WIDE> sum = {};
    for (int row = 0; row < rows; row += TOGETHER) {
        const auto at = [&](int i) { return static_cast<long long>(row + i) * columns; };
        Some<WIDE> value[TOGETHER], d[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (row + i < rows) {
                value[i] = read_as<PACKED, WIDE>(x + at(i), count);
                d[i] = read_as<PACKED, WIDE>(dx + at(i), count);
            }
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (row + i < rows) {
                at_points(value[i], form, [&](int j, Point point) {
                    d[i].of[j] *= point.slope;
                    sum.of[j] = __fadd_rn(sum.of[j], get(put(d[i].of[j])));
                });
                write(dx + at(i), d[i], count);
            }
        }
    }
    return sum;
}

// dx = dx f'(x), and partial sums of the columns of dx over `chunk` rows each, for the gradient of a bias that was
// added before f. dx, x: (rows, columns); parts: (ceil(rows / chunk), columns).
// launch: grid (ceil(rows / chunk), ceil(columns / (256 wide))), block (threads(4 columns / wide))
extern "C" __global__ void activate_backward_parts(T* dx, float* parts, const T* x, int rows, int columns, int chunk,
                                                   int form) {
    const int column = my_column<WIDE>(), count = columns - column;
    if (count <= 0) {
        return;
    }
    const int first = blockIdx.x * chunk, last = min(first + chunk, rows);
    dx += static_cast<long long>(first) * columns + column;
    x += static_cast<long long>(first) * columns + column;
    const bool packed = are_packed<WIDE>(dx, count, columns) && are_packed<WIDE>(x, count, columns);
    const Some<WIDE> sum = packed ? activate_rows<true>(dx, x, last - first, columns, count, form)
                                  : activate_rows<false>(dx, x, last - first, columns, count, form);
    write(parts + static_cast<long long>(blockIdx.x) * columns + column, sum, count);
}

// y = f(gate) up. y: (rows, channels); x: (rows, 2 channels), gate and up side by side.
// launch: grid (rows, ceil(channels / (256 wide))), block (threads(4 channels / wide))
extern "C" __global__ void gate(T* y, const T* x, int rows, int channels, int form) {
    const int column = my_column<WIDE>(), count = channels - column;
    if (count <= 0) {
        return;
    }
    const long long row = blockIdx.x;
    Some<WIDE> value = read<WIDE>(x + 2 * row * channels + column, count);
    const Some<WIDE> up = read<WIDE>(x + (2 * row + 1) * channels + column, count);
    at_points(value, form, [&](int i, Point point) { value.of[i] = point.value * up.of[i]; });
    write(y + row * channels + column, value, count);
}

// dx from dy. dx, x: (rows, 2 channels); dy: (rows, channels).
// launch: grid (rows, ceil(channels / (256 wide))), block (threads(4 channels / wide))
extern "C" __global__ void gate_backward(T* dx, const T* dy, const T* x, int rows, int channels, int form) {
    const int column = my_column<WIDE>(), count = channels - column;
    if (count <= 0) {
        return;
    }
    const long long row = blockIdx.x;
    const long long of_gate = 2 * row * channels + column, of_up = of_gate + channels;
    const Some<WIDE> value = read<WIDE>(x + of_gate, count), up = read<WIDE>(x + of_up, count);
    const Some<WIDE> d = read<WIDE>(dy + row * channels + column, count);
    Some<WIDE> dgate, dup;
    at_points(value, form, [&](int i, Point point) {
        dgate.of[i] = point.slope * up.of[i] * d.of[i];
        dup.of[i] = point.value * d.of[i];
    });
    write(dx + of_gate, dgate, count);
    write(dx + of_up, dup, count);
}

// Gate and up, limited: NaN stays NaN.
struct Clamped {
    float gate, up, share; // share: sigmoid(alpha gate)
};

__device__ inline Clamped clamped_at(float gate, float up, float alpha, float limit) {
    Clamped at = {gate > limit ? limit : gate, up > limit ? limit : up < -limit ? -limit : up, 0.0f};
    at.share = 1.0f / (1.0f + expf(-alpha * at.gate));
    return at;
}

// y = (up + 1) gate sigmoid(alpha gate). x: (n, 2), gate and up in turn. A thread has two pairs.
// launch: grid (ceil(n / 512)), block (256)
extern "C" __global__ void clamped_gate(T* y, const T* x, long long n, float alpha, float limit) {
    const long long at = 2 * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
    const int count = static_cast<int>(min(n - at, 2LL));
    if (count <= 0) {
        return;
    }
    const Four pairs = read(x + 2 * at, 2 * count);
    Some<2> value = {};
    for (int i = 0; i < 2; ++i) {
        const Clamped one = clamped_at(pairs.of[2 * i], pairs.of[2 * i + 1], alpha, limit);
        value.of[i] = (one.up + 1.0f) * (one.gate * one.share);
    }
    write(y + at, value, count);
}

// dx from dy. Behind its limit, a gate or an up projection has the gradient 0. dx, x: (n, 2); dy: (n).
// launch: grid (ceil(n / 512)), block (256)
extern "C" __global__ void clamped_gate_backward(T* dx, const T* dy, const T* x, long long n, float alpha,
                                                 float limit) {
    const long long at = 2 * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
    const int count = static_cast<int>(min(n - at, 2LL));
    if (count <= 0) {
        return;
    }
    const Four pairs = read(x + 2 * at, 2 * count);
    const Some<2> of_y = read<2>(dy + at, count);
    Four d = {};
    for (int i = 0; i < 2; ++i) {
        const float gate = pairs.of[2 * i], up = pairs.of[2 * i + 1];
        const Clamped one = clamped_at(gate, up, alpha, limit);
        const float slope = one.share * (1.0f + alpha * one.gate * (1.0f - one.share));
        d.of[2 * i] = gate > limit ? 0.0f : of_y.of[i] * (one.up + 1.0f) * slope;
        d.of[2 * i + 1] = fabsf(up) > limit ? 0.0f : of_y.of[i] * (one.gate * one.share);
    }
    write(dx + 2 * at, d, 2 * count);
}

// out (+)= the sum of partial sums, in order: `count` of `length`, `stride` apart.
// launch: grid (ceil(length / 256)), block (256)
extern "C" __global__ void fold(float* out, const float* parts, int count, long long stride, int length,
                                int accumulate) {
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= length) {
        return;
    }
    float sum = accumulate ? out[at] : 0.0f;
#pragma unroll 8 // so that loads do not wait for each other
    for (int part = 0; part < count; ++part) {
        sum += parts[part * stride + at];
    }
    out[at] = sum;
}

template <bool PACKED>
__device__ inline Four sum_of_rows(const T* x, long long from, long long to, int columns, int count) {
    Four sum = {};
#pragma unroll 4
    for (long long row = from; row < to; ++row) {
        const Four value = read_as<PACKED>(x + row * columns, count);
        for (int i = 0; i < 4; ++i) {
            sum.of[i] += value.of[i];
        }
    }
    return sum;
}

// Partial sums of columns, `chunk` rows each. parts: (ceil(rows / chunk), columns).
// launch: grid (ceil(rows / chunk), ceil(columns / 1024)), block (threads(columns))
extern "C" __global__ void column_parts(float* parts, const T* x, int rows, int columns, int stride,
                                        int chunk) {
    const int column = my_column(), count = columns - column;
    if (count <= 0) {
        return;
    }
    const long long from = static_cast<long long>(blockIdx.x) * chunk;
    const long long to = min(from + chunk, static_cast<long long>(rows));
    x += column;
    const Four sum = are_packed(x, count, stride) ? sum_of_rows<true>(x, from, to, stride, count)
                                                  : sum_of_rows<false>(x, from, to, stride, count);
    write(parts + static_cast<long long>(blockIdx.x) * columns + column, sum, count);
}
