// Rotary position embeddings (Su et al. 2021). Of the channels of a head that rotate, channel i of the first half is paired
// with channel i of the second half, as in transformers, or neighbours are paired.

constexpr int PAIRS = sizeof(Rotary::frequencies) / sizeof(float);

// Rotates queries and keys in place, or back. qkv: (rows, (H + 2K) D).
// pasts: cached positions of each sequence; null: all sequences have size.past.
// launch: grid (rows), block (256)
extern "C" __global__ void rotate(T* qkv, Rotary rotary, const int* starts, const unsigned* documents,
                                  const int* pasts, Attention size, int back) {
    alignas(16) __shared__ float cosines[PAIRS], sines[PAIRS];
    const long long row = blockIdx.x;
    const Sequence sequence = sequence_of(starts, size.sequences, size.rows, blockIdx.x);
    const int past = pasts != nullptr ? pasts[sequence.index] : size.past;
    const int position = position_of(documents, past, sequence, blockIdx.x);
    const int pairs = rotary.pairs;
    const float growth =
        rotary.positions == 0 ? 1.0f : 1.0f + rotary.beta * logf(static_cast<float>(1 + position / rotary.positions));
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        // The angle is rounded to float, as in transformers.
        float sine, cosine;
        sincosf(static_cast<float>(position) * rotary.frequencies[pair], &sine, &cosine);
        cosines[pair] = cosine * rotary.scale;
        sines[pair] = (back ? -sine : sine) * rotary.scale;
    }
    __syncthreads();

    const int heads = size.heads + size.kv_heads, fours = (pairs + 3) / 4;
    qkv += row * (heads + size.kv_heads) * size.head_size;
    for (int index = threadIdx.x; index < heads * fours; index += blockDim.x) {
        const int head = index / fours, pair = 4 * (index % fours), count = pairs - pair;
        const float factor = head < size.heads ? growth : 1.0f;
        if (rotary.interleaved) {
            for (int i = 0; i < min(count, 4); ++i) {
                T* const at = qkv + head * size.head_size + 2 * (pair + i);
                const float a = factor * get(at[0]), b = factor * get(at[1]);
                const float cosine = cosines[pair + i], sine = sines[pair + i];
                set(at[0], a * cosine - b * sine);
                set(at[1], b * cosine + a * sine);
            }
            continue;
        }
        T* const first = qkv + head * size.head_size + pair;
        T* const second = first + rotary.distance;
        const Four a = read(first, count), b = read(second, count);
        const Four cosine = read(cosines + pair, count), sine = read(sines + pair, count);
        Four turned_a, turned_b;
        for (int i = 0; i < 4; ++i) {
            turned_a.of[i] = factor * (a.of[i] * cosine.of[i] - b.of[i] * sine.of[i]);
            turned_b.of[i] = factor * (b.of[i] * cosine.of[i] + a.of[i] * sine.of[i]);
        }
        write(first, turned_a, count);
        write(second, turned_b, count);
    }
}
