// Gates of attention's output (Qiu et al. 2025, as in Qwen3.5). The projection has each head's queries and gates side by
// side, then all keys and values.

// Where a column of the projection is: in the queries, keys and values, or in the gates.
struct Column {
    bool is_gate;
    int at;
};

__device__ inline Column column_of(int column, const Attention& size) {
    const int width = size.heads * size.head_size;
    if (column >= 2 * width) {
        return {false, column - width};
    }
    const int pair = column / (2 * size.head_size), within = column % (2 * size.head_size);
    const bool is_gate = within >= size.head_size;
    return {is_gate, pair * size.head_size + within - (is_gate ? size.head_size : 0)};
}

// Takes a projection x of (rows, (2 H + 2 K) D) apart, to queries, keys and values, (rows, (H + 2 K) D), and gates,
// (rows, H D). width: columns of x.
// launch: grid (rows, ceil(width / 1024)), block (threads(width))
extern "C" __global__ void split_gates(T* qkv, T* gates, const T* x, int width, Attention size) {
    const long long row = blockIdx.x;
    const int first = my_column(), of_gates = size.heads * size.head_size;
    for (int column = first; column < min(first + 4, width); ++column) {
        const Column to = column_of(column, size);
        (to.is_gate ? gates + row * of_gates : qkv + row * (width - of_gates))[to.at] = x[row * width + column];
    }
}

// Puts a projection y together: the backward of split_gates.
// launch: grid (rows, ceil(width / 1024)), block (threads(width))
extern "C" __global__ void join_gates(T* y, const T* qkv, const T* gates, int width, Attention size) {
    const long long row = blockIdx.x;
    const int first = my_column(), of_gates = size.heads * size.head_size;
    for (int column = first; column < min(first + 4, width); ++column) {
        const Column from = column_of(column, size);
        y[row * width + column] = (from.is_gate ? gates + row * of_gates : qkv + row * (width - of_gates))[from.at];
    }
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// y = x sigmoid(gates).
// launch: grid (ceil(n / 1024)), block (256)
extern "C" __global__ void sigmoid_gate(T* y, const T* x, const T* gates, long long n) {
    const long long at = 4 * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
    if (at >= n) {
        return;
    }
    const int some = static_cast<int>(min(n - at, 4LL));
    const Four gate = read(gates + at, some);
    Four value = read(x + at, some);
    for (int i = 0; i < 4; ++i) {
        value.of[i] *= sigmoid(gate.of[i]);
    }
    write(y + at, value, some);
}

// dx = dy sigmoid(gates), and the gradients of the gates.
// launch: grid (ceil(n / 1024)), block (256)
extern "C" __global__ void sigmoid_gate_backward(T* dx, T* dgates, const T* dy, const T* x, const T* gates,
                                                 long long n) {
    const long long at = 4 * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
    if (at >= n) {
        return;
    }
    const int some = static_cast<int>(min(n - at, 4LL));
    const Four gate = read(gates + at, some), value = read(x + at, some);
    Four d = read(dy + at, some), dgate;
    for (int i = 0; i < 4; ++i) {
        const float s = sigmoid(gate.of[i]);
        dgate.of[i] = d.of[i] * value.of[i] * (s * (1.0f - s));
        d.of[i] *= s;
    }
    write(dx + at, d, some);
    write(dgates + at, dgate, some);
}
