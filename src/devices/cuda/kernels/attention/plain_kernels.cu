// The plain way for floats, with heads of up to 256 channels.

#if ELEMENT == 32

#if COMPILES(FORWARD_PASS)
// launch: grid (heads, ceil(longest / 64), sequences), block (256), shared 35840 bytes
extern "C" __global__ void __launch_bounds__(PLAIN_THREADS, 2)
    attention(T* y, float* lse, const T* qkv, const T* kv, const int* starts, const unsigned* documents,
              Attention size) {
    plain_forward<1>(y, lse, qkv, kv, starts, documents, size);
}
#endif

#if COMPILES(KEYS_PASS)
// launch: grid (shares kv_heads, ceil((past + longest - first_kept) / 64), sequences), block (256), shared 35840 bytes
extern "C" __global__ void __launch_bounds__(PLAIN_THREADS)
    attention_backward_keys(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                            const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                            Attention size, int accumulate, int shares) {
    plain_backward_keys<1>(dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size, accumulate, shares);
}
#endif

#if COMPILES(QUERIES_PASS)
// launch: grid (heads, ceil(longest / 64), sequences), block (256), shared 35840 bytes
extern "C" __global__ void __launch_bounds__(PLAIN_THREADS, 2)
    attention_backward_queries(T* dqkv, const T* dy, const float* lse, const float* delta, const T* qkv,
                               const T* kv, const int* starts, const unsigned* documents, Attention size) {
    plain_backward_queries<1>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}
#endif

#endif

// The plain way for all elements, with heads of 257 to 512 channels.

#if COMPILES(FORWARD_PASS + 512)
// launch: grid (2 heads, ceil(longest / 64), sequences), block (256), shared 35840 bytes
extern "C" __global__ void __launch_bounds__(PLAIN_THREADS)
    attention_wide(T* y, float* lse, const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                   Attention size) {
    plain_forward<2>(y, lse, qkv, kv, starts, documents, size);
}
#endif

#if COMPILES(KEYS_PASS + 512)
// launch: grid (2 shares kv_heads, ceil((past + longest - first_kept) / 64), sequences), block (256), shared 35840 bytes
extern "C" __global__ void __launch_bounds__(PLAIN_THREADS)
    attention_backward_keys_wide(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                 const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                                 Attention size, int accumulate, int shares) {
    plain_backward_keys<2>(dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size, accumulate, shares);
}
#endif

#if COMPILES(QUERIES_PASS + 512)
// launch: grid (2 heads, ceil(longest / 64), sequences), block (256), shared 35840 bytes
extern "C" __global__ void __launch_bounds__(PLAIN_THREADS)
    attention_backward_queries_wide(T* dqkv, const T* dy, const float* lse, const float* delta, const T* qkv,
                                    const T* kv, const int* starts, const unsigned* documents, Attention size) {
    plain_backward_queries<2>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}
#endif
