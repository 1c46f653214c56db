// The kernels on tensor cores, by the head size that they pad to.

#if ELEMENT != 32

#if COMPILES(FORWARD_PASS + 32)
// launch: grid (heads, ceil(longest / 128), sequences), block (128), shared 22528 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_32(T* y, float* lse, const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                 Attention size) {
    forward<32, 64, 4, 2, HOLDS>(y, lse, qkv, kv, starts, documents, size);
}
#endif

#if COMPILES(KEYS_PASS + 32)
// launch: grid (shares kv_heads, ceil((past + longest - first_kept) / 128), sequences), block (128), shared 33792 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_keys_32(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                               const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                               Attention size, int accumulate, int shares) {
    backward_keys<32, 32, 4, 2, 32, 2, HOLDS>(dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size,
                                             accumulate != 0, shares);
}
#endif

#if COMPILES(QUERIES_PASS + 32)
// launch: grid (heads, ceil(longest / 128), sequences), block (128), shared 32768 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_queries_32(T* dqkv, const T* dy, const float* lse, const float* delta, const T* qkv,
                                  const T* kv, const int* starts, const unsigned* documents,
                                  Attention size) {
    backward_queries<32, 32, 4, 2, 2, HOLDS>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}
#endif

#if COMPILES(FORWARD_PASS + 64)
// launch: grid (heads, ceil(longest / 128), sequences), block (128), shared 38912 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_64(T* y, float* lse, const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                 Attention size) {
    forward<64, 64, 4, 2, false>(y, lse, qkv, kv, starts, documents, size);
}
#endif

#if COMPILES(KEYS_PASS + 64)
// launch: grid (shares kv_heads, ceil((past + longest - first_kept) / 128), sequences), block (128), shared 58368 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_keys_64(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                               const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                               Attention size, int accumulate, int shares) {
    backward_keys<64, 32, 4, 2, 64, 2, false>(dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size,
                                              accumulate != 0, shares);
}
#endif

#if COMPILES(QUERIES_PASS + 64)
// launch: grid (heads, ceil(longest / 128), sequences), block (128), shared 57344 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_queries_64(T* dqkv, const T* dy, const float* lse, const float* delta, const T* qkv,
                                  const T* kv, const int* starts, const unsigned* documents,
                                  Attention size) {
    backward_queries<64, 32, 4, 2, 2, false>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}
#endif

#if COMPILES(FORWARD_PASS + 128)
// launch: grid (heads, ceil(longest / 128), sequences), block (128), shared 53248 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_128(T* y, float* lse, const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                  Attention size) {
    forward<128, 32, 4, 2, false>(y, lse, qkv, kv, starts, documents, size);
}
#endif

#if COMPILES(KEYS_PASS + 128)
// launch: grid (shares kv_heads, ceil((past + longest - first_kept) / 64), sequences), block (128), shared 71680 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_keys_128(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                                Attention size, int accumulate, int shares) {
    backward_keys<128, 32, 4, 2, 128, 1, HOLDS>(dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size,
                                               accumulate != 0, shares);
}
#endif

#if COMPILES(QUERIES_PASS + 128)
// launch: grid (heads, ceil(longest / 64), sequences), block (128), shared 70656 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_queries_128(T* dqkv, const T* dy, const float* lse, const float* delta, const T* qkv,
                                   const T* kv, const int* starts, const unsigned* documents,
                                   Attention size) {
    backward_queries<128, 32, 4, 2, 1, HOLDS>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}
#endif

#if COMPILES(FORWARD_PASS + 256)
// launch: grid (heads, ceil(longest / 64), sequences), block (128), shared 68096 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_256(T* y, float* lse, const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                  Attention size) {
    forward<256, 32, 4, 1, false>(y, lse, qkv, kv, starts, documents, size);
}
#endif

#if COMPILES(KEYS_PASS + 256)
// launch: grid (2 shares kv_heads, ceil((past + longest - first_kept) / 64), sequences), block (128), shared 84992 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_keys_256(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                                Attention size, int accumulate, int shares) {
    backward_keys<256, 16, 4, 1, 128, 1, false>(dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size,
                                                accumulate != 0, shares);
}
#endif

#if COMPILES(QUERIES_PASS + 256)
// launch: grid (heads, ceil(longest / 64), sequences), block (128), shared 84736 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_queries_256(T* dqkv, const T* dy, const float* lse, const float* delta, const T* qkv,
                                   const T* kv, const int* starts, const unsigned* documents,
                                   Attention size) {
    backward_queries<256, 16, 4, 1, 1, false>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}
#endif

// ---- For sm_70 and sm_75, in place of those kernels above that take more than 64 KiB of shared memory, the most that
// a block of sm_75 may have. ----

#if ELEMENT == 15 && (defined EMULATOR || __CUDA_ARCH__ < 800)

#if COMPILES(KEYS_PASS + 128)
// launch: grid (shares kv_heads, ceil((past + longest - first_kept) / 64), sequences), block (128), shared 53248 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_keys_128_64k(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                    const T* qkv, const T* kv, const int* starts,
                                    const unsigned* documents, Attention size, int accumulate, int shares) {
    backward_keys<128, 32, 4, 1, 128, 1, false>(dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size,
                                               accumulate != 0, shares);
}
#endif

#if COMPILES(QUERIES_PASS + 128)
// launch: grid (heads, ceil(longest / 64), sequences), block (128), shared 52736 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_queries_128_64k(T* dqkv, const T* dy, const float* lse, const float* delta,
                                       const T* qkv, const T* kv, const int* starts,
                                       const unsigned* documents, Attention size) {
    backward_queries<128, 32, 4, 1, 1, HOLDS>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}
#endif

#if COMPILES(FORWARD_PASS + 256)
// launch: grid (heads, ceil(longest / 64), sequences), block (128), shared 50944 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_256_64k(T* y, float* lse, const T* qkv, const T* kv, const int* starts,
                      const unsigned* documents, Attention size) {
    forward<256, 16, 4, 1, false>(y, lse, qkv, kv, starts, documents, size);
}
#endif

#if COMPILES(KEYS_PASS + 256)
// launch: grid (2 shares kv_heads, ceil((past + longest - first_kept) / 32), sequences), block (64), shared 51072 bytes
extern "C" __global__ void __launch_bounds__(64)
    attention_backward_keys_256_64k(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                    const T* qkv, const T* kv, const int* starts,
                                    const unsigned* documents, Attention size, int accumulate, int shares) {
    backward_keys<256, 16, 2, 1, 128, 1, false>(dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size,
                                                accumulate != 0, shares);
}
#endif

#if COMPILES(QUERIES_PASS + 256)
// launch: grid (heads, ceil(longest / 32), sequences), block (64), shared 50816 bytes
extern "C" __global__ void __launch_bounds__(64)
    attention_backward_queries_256_64k(T* dqkv, const T* dy, const float* lse, const float* delta,
                                       const T* qkv, const T* kv, const int* starts,
                                       const unsigned* documents, Attention size) {
    backward_queries<256, 16, 2, 1, 1, false>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}
#endif

#endif

#endif
