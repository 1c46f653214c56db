// Dequantises frozen weights. Each product and each sum is rounded by itself, as on the CPU, so that in float the
// values are the CPU's to the bit.

// The quantiles of the normal distribution that the codes of NF4 stand for.
__device__ const float NF4[16] = {
    -1.0f, -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f, -0.091050036f, 0.0f,
    0.0795803f, 0.1609302f, 0.2461123f, 0.33791524f, 0.44070983f, 0.562617f, 0.72295684f, 1.0f,
};

// The positive values of the signed 8-bit dynamic map, except 1. The map has the negative of each, too.
__device__ const float DYNAMIC[127] = {
    5.5000004e-7f, 3.2500002e-6f, 7.75e-6f, 2.1249998e-5f, 4.375e-5f, 6.625e-5f, 8.875e-5f, 0.00015625001f,
    0.00026875004f, 0.00038125002f, 0.00049375003f, 0.0006062501f, 0.00071875006f, 0.00083125f,
    0.0009437501f, 0.0012812499f, 0.00184375f, 0.00240625f, 0.00296875f, 0.0035312497f, 0.00409375f,
    0.0046562497f, 0.0052187503f, 0.00578125f, 0.00634375f, 0.00690625f, 0.00746875f, 0.00803125f,
    0.00859375f, 0.009156249f, 0.00971875f, 0.01140625f, 0.01421875f, 0.01703125f, 0.019843752f, 0.02265625f,
    0.02546875f, 0.028281251f, 0.03109375f, 0.03390625f, 0.036718752f, 0.03953125f, 0.042343747f,
    0.04515625f, 0.04796875f, 0.05078125f, 0.05359375f, 0.05640625f, 0.059218753f, 0.06203125f, 0.06484375f,
    0.067656256f, 0.070468746f, 0.07328125f, 0.07609375f, 0.07890625f, 0.08171876f, 0.08453125f, 0.08734375f,
    0.09015625f, 0.092968754f, 0.09578126f, 0.09859375f, 0.107031256f, 0.12109375f, 0.13515624f, 0.14921875f,
    0.16328125f, 0.17734376f, 0.19140625f, 0.20546874f, 0.21953125f, 0.23359375f, 0.24765624f, 0.26171875f,
    0.27578127f, 0.28984374f, 0.30390626f, 0.31796873f, 0.33203125f, 0.34609374f, 0.36015624f, 0.37421876f,
    0.38828123f, 0.40234375f, 0.41640624f, 0.43046874f, 0.44453126f, 0.45859373f, 0.47265625f, 0.4867187f,
    0.50078124f, 0.5148437f, 0.5289062f, 0.54296875f, 0.5570313f, 0.5710938f, 0.58515626f, 0.5992187f,
    0.61328125f, 0.6273438f, 0.6414063f, 0.65546876f, 0.6695312f, 0.68359375f, 0.6976563f, 0.7117188f,
    0.72578126f, 0.7398437f, 0.75390625f, 0.7679688f, 0.78203124f, 0.79609376f, 0.8101562f, 0.82421875f,
    0.8382813f, 0.85234374f, 0.86640626f, 0.8804687f, 0.89453125f, 0.9085938f, 0.92265624f, 0.93671876f,
    0.9507812f, 0.96484375f, 0.9789063f, 0.99296874f,
};

// The value of a code of the map, in order: the negative values, 0, the positive values, 1.
__device__ inline float dynamic_value(int code) {
    if (code < 127) {
        return -DYNAMIC[126 - code];
    }
    return code == 127 ? 0.0f : code == 255 ? 1.0f : DYNAMIC[code - 128];
}

// The first `count` of four bytes, and 0 for the rest.
__device__ inline unsigned word_at(const unsigned char* from, int count) {
    if (is_packed(from, count)) {
        return *reinterpret_cast<const unsigned*>(from);
    }
    unsigned word = 0;
    for (int i = 0; i < 4; ++i) {
        if (i < count) {
            word |= static_cast<unsigned>(from[i]) << (8 * i);
        }
    }
    return word;
}

// y = the matrix, of n elements. codes: two a byte, the first in the upper half; scales: a code of the dynamic
// map for each 64 elements; groups: a float for each 256 scales; offset: a float. A thread has eight elements.
// launch: grid (ceil(n / 2048)), block (256)
extern "C" __global__ void dequantise_nf4(T* y, const unsigned char* codes, const unsigned char* scales,
                                          const float* groups, const float* offset, long long n) {
    const long long at = 8 * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
    if (at >= n) {
        return;
    }
    const int count = static_cast<int>(min(n - at, 8LL));
    const long long block = at / 64;
    const float scale = __fadd_rn(__fmul_rn(dynamic_value(scales[block]), groups[block / 256]), *offset);
    const unsigned word = word_at(codes + at / 2, (count + 1) / 2);
    for (int first = 0; first < 8; first += WIDE) {
        Some<WIDE> values;
        for (int i = 0; i < WIDE; ++i) {
            const unsigned byte = word >> (8 * ((first + i) / 2));
            values.of[i] = __fmul_rn(NF4[(i % 2 == 0 ? byte >> 4 : byte) & 15], scale);
        }
        write(y + at + first, values, count - first);
    }
}

// y = a part of a matrix, of n elements: runs of `run` elements that follow each other in it, `pitch` elements from
// one to the next. codes: those of y; scales, groups, offset: those of the matrix, from the group in which the part
// begins, where it is the element `first`. Runs begin and end at whole bytes. A thread has two elements.
// launch: grid (ceil(n / 512)), block (256)
extern "C" __global__ void dequantise_nf4_part(T* y, const unsigned char* codes, const unsigned char* scales,
                                               const float* groups, const float* offset, long long n,
                                               long long run, long long pitch, long long first) {
    const long long at = 2 * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
    if (at >= n) {
        return;
    }
    const long long row = at / run, block = (first + row * pitch + at % run) / 64;
    const float scale = __fadd_rn(__fmul_rn(dynamic_value(scales[block]), groups[block / 256]), *offset);
    const unsigned byte = codes[at / 2];
    const Some<2> values = {__fmul_rn(NF4[byte >> 4], scale), __fmul_rn(NF4[byte & 15], scale)};
    write(y + at, values, static_cast<int>(min(n - at, 2LL)));
}

// A bfloat16, whatever ELEMENT is: the upper half of a float.
struct Upper {
    unsigned short bits;
};

__device__ inline float get(Upper x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

// y = n values of bfloat16.
// launch: grid (ceil(n / (256 wide))), block (256)
extern "C" __global__ void dequantise_bf16(T* y, const Upper* x, long long n) {
    const long long at = WIDE * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
    if (at >= n) {
        return;
    }
    const int count = static_cast<int>(min(n - at, static_cast<long long>(WIDE)));
    write(y + at, read<WIDE>(x + at, count), count);
}

// y = codes times the scale of their row. y, codes: (rows, columns); scales: (rows).
// launch: grid (rows, ceil(columns / (256 wide))), block (threads(4 columns / wide))
extern "C" __global__ void dequantise_int8(T* y, const signed char* codes, const float* scales, int rows,
                                           int columns) {
    const int column = my_column<WIDE>(), count = columns - column;
    if (count <= 0) {
        return;
    }
    const long long row = blockIdx.x, at = row * columns + column;
    Some<WIDE> values = read<WIDE>(codes + at, count);
    for (int i = 0; i < WIDE; ++i) {
        values.of[i] = __fmul_rn(values.of[i], scales[row]);
    }
    write(y + at, values, count);
}
