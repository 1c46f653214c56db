// Position embeddings and token type embeddings, which are added to hidden states.

// y = x + w by position; y may be x. x, y: (rows, C); w: (positions of the model, C).
// pasts: cached positions of each sequence; null: all sequences have `past`.
// launch: grid (rows, ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void add_positions(T* y, const T* x, const T* w, const int* starts,
                                         const unsigned* documents, const int* pasts, int past, int sequences,
                                         int rows, int channels) {
    const int column = my_column(), count = channels - column;
    if (count <= 0) {
        return;
    }
    const long long row = blockIdx.x;
    const Sequence sequence = sequence_of(starts, sequences, rows, blockIdx.x);
    const int before = pasts != nullptr ? pasts[sequence.index] : past;
    const long long place = position_of(documents, before, sequence, blockIdx.x);
    Four value = read(x + row * channels + column, count);
    const Four other = read(w + place * channels + column, count);
    for (int i = 0; i < 4; ++i) {
        value.of[i] += other.of[i];
    }
    write(y + row * channels + column, value, count);
}

// dw (+)= the sum over rows of each position of dy, in order. dw: (table, C).
// launch: grid (table, ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void add_positions_backward(float* dw, const T* dy, const int* starts,
                                                  const unsigned* documents, int past, int sequences,
                                                  int rows, int channels, int table, int accumulate) {
    const int column = my_column(), count = channels - column;
    if (count <= 0) {
        return;
    }
    const int position = blockIdx.x;
    dw += static_cast<long long>(position) * channels + column;
    dy += column;
    Four sum = accumulate ? read(dw, count) : Four{};
    // Without documents, a sequence has each position once; with documents, at this row or at later ones.
    const int from = max(position - past, 0);
    for (int index = 0; index < sequences; ++index) {
        const Sequence sequence = sequence_at(starts, sequences, rows, index);
        const int to = documents != nullptr ? sequence.count : min(position - past + 1, sequence.count);
        for (int row = sequence.first + from; row < sequence.first + to; ++row) {
            if (position_of(documents, past, sequence, row) == position) {
                const Four d = read(dy + static_cast<long long>(row) * channels, count);
                for (int i = 0; i < 4; ++i) {
                    sum.of[i] += d.of[i];
                }
            }
        }
    }
    write(dw, sum, count);
}

// y += w by kind of token. y: (rows, C); w: (kinds, C).
// launch: grid (rows, ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void add_kinds(T* y, const T* w, const unsigned char* kinds, int rows, int channels) {
    const int column = my_column(), count = channels - column;
    if (count <= 0) {
        return;
    }
    const long long row = blockIdx.x;
    Four value = read(y + row * channels + column, count);
    const Four other = read(w + static_cast<long long>(kinds[row]) * channels + column, count);
    for (int i = 0; i < 4; ++i) {
        value.of[i] += other.of[i];
    }
    write(y + row * channels + column, value, count);
}

// Partial sums of dw over `chunk` rows each. parts: (ceil(rows / chunk), count, C).
// launch: grid (ceil(rows / chunk), ceil(channels / 1024), count), block (threads(channels))
extern "C" __global__ void kind_parts(float* parts, const T* dy, const unsigned char* kinds, int rows,
                                      int channels, int count, int chunk) {
    const int column = my_column(), left = channels - column, kind = blockIdx.z;
    if (left <= 0) {
        return;
    }
    const long long from = static_cast<long long>(blockIdx.x) * chunk;
    const long long to = min(from + chunk, static_cast<long long>(rows));
    Four sum = {};
    for (long long row = from; row < to; ++row) {
        if (kinds[row] == kind) {
            const Four d = read(dy + row * channels + column, left);
            for (int i = 0; i < 4; ++i) {
                sum.of[i] += d.of[i];
            }
        }
    }
    write(parts + (static_cast<long long>(blockIdx.x) * count + kind) * channels + column, sum, left);
}
