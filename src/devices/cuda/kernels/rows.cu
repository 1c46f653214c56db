// Gathers and scatters: of labelled rows, and of some columns.

// Finds the rows that have a label: `count` of them in order, from the `first`-th on; -1 past the last. statistics:
// (rows, 4), with the label's bits in the fourth.
// launch: grid (1), block (512)
extern "C" __global__ void labelled_rows(int* places, const float* statistics, int rows, int first,
                                         int count) {
    int found = 0;
    for (int from = 0; from < rows; from += blockDim.x) {
        const int row = from + threadIdx.x;
        const bool has = row < rows && __float_as_int(statistics[4LL * row + 3]) >= 0;
        const Rank rank = block_rank(has);
        const int place = found + rank.before - first;
        if (has && 0 <= place && place < count) {
            places[place] = row;
        }
        found += rank.all;
    }
    for (int place = max(found - first, 0) + threadIdx.x; place < count; place += blockDim.x) {
        places[place] = -1;
    }
}

// y[i] = x[places[i]], or 0 where the place is -1.
// launch: grid (count, ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void gather_rows(T* y, const T* x, const int* places, int count, int channels) {
    const long long place = blockIdx.x;
    const int column = 4 * (blockIdx.y * blockDim.x + threadIdx.x), some = channels - column;
    if (place >= count || some <= 0) {
        return;
    }
    const long long row = places[place];
    const Four value = row < 0 ? Four{} : read(x + row * channels + column, some);
    write(y + place * channels + column, value, some);
}

// y[places[i]] += x[i], unless the place is -1.
// launch: grid (count, ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void add_rows(float* y, const float* x, const int* places, int count, int channels) {
    const long long place = blockIdx.x;
    const int column = my_column(), some = channels - column;
    if (place >= count || some <= 0 || places[place] < 0) {
        return;
    }
    y += static_cast<long long>(places[place]) * channels + column;
    Four sum = read(y, some);
    const Four more = read(x + place * channels + column, some);
    for (int i = 0; i < 4; ++i) {
        sum.of[i] += more.of[i];
    }
    write(y, sum, some);
}

template <class E>
__device__ inline void add_to_columns(E* y, const E* x, int width, int columns, int first, float scale) {
    const long long row = blockIdx.x;
    const int column = my_column(), some = columns - column;
    if (some <= 0) {
        return;
    }
    y += row * width + first + column;
    Four sum = read(y, some);
    const Four more = read(x + row * columns + column, some);
    for (int i = 0; i < 4; ++i) {
        sum.of[i] += scale * more.of[i];
    }
    write(y, sum, some);
}

// y[:, first..first + columns] += scale x. y: (rows, width); x: (rows, columns).
// launch: grid (rows, ceil(columns / 1024)), block (threads(columns))
extern "C" __global__ void add_columns(T* y, const T* x, int rows, int width, int columns, int first,
                                       float scale) {
    add_to_columns(y, x, width, columns, first, scale);
}

// launch: grid (rows, ceil(columns / 1024)), block (threads(columns))
extern "C" __global__ void add_columns_of_floats(float* y, const float* x, int rows, int width, int columns,
                                                 int first, float scale) {
    add_to_columns(y, x, width, columns, first, scale);
}

template <class E>
__device__ inline void copy_to_columns(E* y, const E* x, int y_width, int x_width, int to, int from, int columns) {
    const long long row = blockIdx.x;
    const int column = my_column(), some = columns - column;
    if (some > 0) {
        write(y + row * y_width + to + column, read(x + row * x_width + from + column, some), some);
    }
}

// y[:, to..to + columns] = x[:, from..from + columns]. y: (rows, y_width); x: (rows, x_width).
// launch: grid (rows, ceil(columns / 1024)), block (threads(columns))
extern "C" __global__ void copy_columns(T* y, const T* x, int rows, int y_width, int x_width, int to, int from,
                                        int columns) {
    copy_to_columns(y, x, y_width, x_width, to, from, columns);
}

// launch: grid (rows, ceil(columns / 1024)), block (threads(columns))
extern "C" __global__ void copy_columns_of_floats(float* y, const float* x, int rows, int y_width, int x_width,
                                                  int to, int from, int columns) {
    copy_to_columns(y, x, y_width, x_width, to, from, columns);
}

// y = scale x[:, first..first + columns]. y: (rows, columns); x: (rows, width).
// launch: grid (rows, ceil(columns / 1024)), block (threads(columns))
extern "C" __global__ void take_columns(T* y, const T* x, int rows, int width, int columns, int first,
                                        float scale) {
    const long long row = blockIdx.x;
    const int column = my_column(), some = columns - column;
    if (some <= 0) {
        return;
    }
    Four values = read(x + row * width + first + column, some);
    for (int i = 0; i < 4; ++i) {
        values.of[i] *= scale;
    }
    write(y + row * columns + column, values, some);
}

// Columns of one kind: those that a group has, the first of them in the first group, how far those of the next group lie
// behind, and the first of this kind where columns lie kind by kind. Without columns there is no such kind.
struct GroupedColumns {
    int columns, first, stride, by_kind;
};

struct ColumnGroups {
    int count;
    GroupedColumns kinds[6];
};

// Columns that lie in groups, each with columns of all kinds, are put kind by kind; or back. (rows, width).
// launch: grid (rows, ceil(width / 1024)), block (threads(width))
extern "C" __global__ void regroup_columns(T* y, const T* x, int rows, int width, int back, ColumnGroups groups) {
    const int column = my_column(), end = min(column + 4, width);
    y += static_cast<long long>(blockIdx.x) * width;
    x += static_cast<long long>(blockIdx.x) * width;
    for (int by_kind = column; by_kind < end; ++by_kind) {
        int in_group = 0;
        for (int i = 0; i < 6; ++i) {
            const GroupedColumns& kind = groups.kinds[i];
            const int at = by_kind - kind.by_kind;
            if (0 <= at && at < groups.count * kind.columns) {
                in_group = kind.first + at / kind.columns * kind.stride + at % kind.columns;
            }
        }
        y[back ? in_group : by_kind] = x[back ? by_kind : in_group];
    }
}
