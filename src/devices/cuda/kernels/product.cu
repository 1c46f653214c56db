// Products that cuBLASLt has no algorithm for, in tiles of 16 x 16. Sums over the inner size are in float and in order.
// The kernel is simple rather than fast, because it is rarely used.

constexpr int TILE = 16;

// An element of a matrix by rows, or of its transpose; 0 outside.
__device__ inline float element(const T* x, int stride, int transposed, int row, int column, int rows,
                                int columns) {
    if (row >= rows || column >= columns) {
        return 0.0f;
    }
    const long long at = transposed ? static_cast<long long>(column) * stride + row
                                    : static_cast<long long>(row) * stride + column;
    return get(x[at]);
}

template <class C>
__device__ inline void product_tile(C* c, const T* a, const T* b, const T* bias, int rows, int inner,
                                    int columns, int stride, int a_stride, int b_stride, int a_transposed,
                                    int b_transposed, int accumulate) {
    __shared__ float a_tile[TILE * TILE];
    __shared__ float b_tile[TILE * TILE];
    const int i = threadIdx.x / TILE, j = threadIdx.x % TILE;
    const int row = blockIdx.y * TILE + i, column = blockIdx.x * TILE + j;
    float sum = 0.0f;
    for (int from = 0; from < inner; from += TILE) {
        a_tile[threadIdx.x] = element(a, a_stride, a_transposed, row, from + j, rows, inner);
        b_tile[threadIdx.x] = element(b, b_stride, b_transposed, from + i, column, inner, columns);
        __syncthreads();
        for (int k = 0; k < TILE; ++k) {
            sum += a_tile[i * TILE + k] * b_tile[k * TILE + j];
        }
        __syncthreads();
    }
    if (row < rows && column < columns) {
        C& to = c[static_cast<long long>(row) * stride + column];
        if (accumulate) {
            sum += get(to);
        }
        if (bias != nullptr) {
            sum += get(bias[column]);
        }
        set(to, sum);
    }
}

// c (+)= a b + bias. a: (rows, inner); b: (inner, columns), each transposed or not; c: (rows, columns).
// launch: grid (ceil(columns / 16), ceil(rows / 16)), block (256)
extern "C" __global__ void product(T* c, const T* a, const T* b, const T* bias, int rows, int inner,
                                   int columns, int stride, int a_stride, int b_stride, int a_transposed,
                                   int b_transposed, int accumulate) {
    product_tile(c, a, b, bias, rows, inner, columns, stride, a_stride, b_stride, a_transposed, b_transposed,
                 accumulate);
}

// launch: grid (ceil(columns / 16), ceil(rows / 16)), block (256)
extern "C" __global__ void product_to_floats(float* c, const T* a, const T* b, const T* bias, int rows,
                                             int inner, int columns, int stride, int a_stride, int b_stride,
                                             int a_transposed, int b_transposed, int accumulate) {
    product_tile(c, a, b, bias, rows, inner, columns, stride, a_stride, b_stride, a_transposed, b_transposed,
                 accumulate);
}
