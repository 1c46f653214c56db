// Looks at every access to memory of the emulated kernels: data races, accesses outside of all buffers,
// reads of what nobody has written; and what accesses cost: bank conflicts and sectors.
//
// The kernels' text is compiled with -fsanitize=thread, whose calls before each access are defined here,
// in place of that tool's library. Only emulator.h tells what is a thread, a barrier and a launch.
//
// Two accesses of a byte by two threads, one of them a write, are a race, in whatever order the emulator
// has run them, unless a barrier lies between: of the block, or, for threads of a warp, __syncwarp. Shuffles
// order nothing. Nothing is between blocks. Accesses that are volatile are meant to be at once, and are left
// out. What cp.async copies is in flight, and nobody's, until its thread has waited.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <link.h>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

constexpr unsigned LANES = 32;
constexpr std::size_t LINE = 64;

using Address = std::uintptr_t;

struct Range {
    Address begin, end;

    bool has(Address at, std::size_t bytes) const { return begin <= at && at + bytes <= end; }
};

// Global memory that a test made. Of outputs, whether each byte was written; null: all were.
struct Buffer {
    Range range;
    bool* is_written;
};

// Who has accessed a byte, and when.
struct Access {
    unsigned block = 0, thread = 0, block_epoch = 0, warp_epoch = 0;
    bool is = false, is_in_flight = false;

    bool is_of(const Access& other) const { return block == other.block && thread == other.thread; }

    // Whether it comes before another one, which the emulator has run later.
    bool is_before(const Access& later) const {
        if (!is || (is_of(later) && !is_in_flight)) {
            return true;
        }
        if (block != later.block || is_in_flight) {
            return false;
        }
        return block_epoch < later.block_epoch ||
               (thread / LANES == later.thread / LANES && warp_epoch < later.warp_epoch);
    }
};

struct Byte {
    Access write;
    // The last reads of two threads, and one of another block.
    Access reads[3];
};

// What lanes of a warp access by one instruction, the so-many-th time since a barrier.
struct Request {
    bool is_shared;
    std::size_t bytes;
    std::vector<Address> at;
};

// What requests of a kind cost, and would cost at least.
struct Cost {
    unsigned long long paid = 0, least = 0;
};

struct State {
    bool is_on = false;
    Access now;
    Range stack, shared;
    std::vector<unsigned> warp_epochs;
    std::vector<Buffer> buffers;
    std::vector<Range> built_in;
    std::unordered_map<Address, std::unique_ptr<std::array<Byte, LINE>>> global, of_block;
    std::map<std::pair<unsigned, std::pair<const void*, unsigned>>, Request> requests;
    std::map<std::pair<unsigned, const void*>, unsigned> times;
    std::string kernel;
    std::set<std::string> found;
    std::map<std::string, std::array<Cost, 2>> costs;
};

thread_local State state;

// This library's memory: constants, and its thread-local variables, which are a block's shared memory.
int note_library(dl_phdr_info* info, std::size_t, void* to) {
    auto* const ranges = static_cast<std::pair<std::vector<Range>, Range>*>(to);
    const Address here = reinterpret_cast<Address>(&note_library);
    bool is_this = false;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& part = info->dlpi_phdr[i];
        const Address begin = info->dlpi_addr + part.p_vaddr;
        is_this |= part.p_type == PT_LOAD && begin <= here && here < begin + part.p_memsz;
    }
    for (int i = 0; is_this && i < info->dlpi_phnum; ++i) {
        const auto& part = info->dlpi_phdr[i];
        const Address begin = info->dlpi_addr + part.p_vaddr;
        if (part.p_type == PT_LOAD) {
            ranges->first.push_back({begin, begin + part.p_memsz});
        } else if (part.p_type == PT_TLS && info->dlpi_tls_data != nullptr) {
            const Address data = reinterpret_cast<Address>(info->dlpi_tls_data);
            ranges->second = {data, data + part.p_memsz};
        }
    }
    return is_this;
}

const std::pair<std::vector<Range>, Range>& library() {
    static thread_local std::pair<std::vector<Range>, Range> ranges = [] {
        std::pair<std::vector<Range>, Range> found;
        dl_iterate_phdr(note_library, &found);
        return found;
    }();
    return ranges;
}

bool any_has(const std::vector<Range>& ranges, Address at, std::size_t bytes) {
    return std::any_of(ranges.begin(), ranges.end(), [&](const Range& one) { return one.has(at, bytes); });
}

void report(const char* what, Address at, const Access& before) {
    char place[64] = "", other[64] = "", text[256];
    if (state.shared.has(at, 1)) {
        std::snprintf(place, sizeof place, ", at byte %zu of shared memory", at - state.shared.begin);
    }
    if (before.is) {
        std::snprintf(other, sizeof other, ", after thread %u of block %u", before.thread, before.block);
    }
    std::snprintf(text, sizeof text, "%s: %s by thread %u of block %u%s%s", state.kernel.c_str(), what,
                  state.now.thread, state.now.block, place, other);
    // Once for each kernel and kind.
    const std::string key = state.kernel + ": " + what;
    for (const std::string& known : state.found) {
        if (known.compare(0, key.size(), key) == 0) {
            return;
        }
    }
    state.found.insert(text);
}

void note_request(Address at, std::size_t bytes, bool is_shared, const void* instruction) {
    const unsigned warp = state.now.thread / LANES;
    const unsigned time = state.times[{state.now.thread, instruction}]++;
    Request& request = state.requests[{warp, {instruction, time}}];
    request.is_shared = is_shared;
    request.bytes = bytes;
    request.at.push_back(at);
}

void visit(Address at, std::size_t bytes, bool is_write, const void* instruction, bool in_flight = false) {
    if (!state.is_on || state.stack.has(at, bytes) || any_has(state.built_in, at, bytes)) {
        return;
    }
    state.is_on = false;
    const Range& locals = library().second;
    const bool is_dynamic = state.shared.has(at, bytes), is_static = locals.has(at, bytes);
    const bool is_shared = is_dynamic || is_static;
    const auto buffer = std::find_if(state.buffers.begin(), state.buffers.end(),
                                     [&](const Buffer& one) { return one.range.has(at, bytes); });
    if (!is_shared && buffer == state.buffers.end()) {
        if (!any_has(library().first, at, bytes)) {
            report(is_write ? "write outside of all buffers" : "read outside of all buffers", at, {});
        }
        state.is_on = true;
        return; // a constant
    }
    Access now = state.now;
    now.is = true;
    now.is_in_flight = in_flight;
    now.warp_epoch = state.warp_epochs[now.thread];
    auto& lines = is_shared ? state.of_block : state.global;
    bool* const is_written = is_shared ? nullptr : buffer->is_written;
    for (Address byte = at; byte < at + bytes; ++byte) {
        auto& line = lines[byte / LINE];
        if (!line) {
            line = std::make_unique<std::array<Byte, LINE>>();
        }
        Byte& of = (*line)[byte % LINE];
        if (is_write) {
            if (!of.write.is_before(now)) {
                report(of.write.is_in_flight ? "write to what is in flight" : "two writes at once", byte, of.write);
            }
            for (const Access& read : of.reads) {
                if (!read.is_before(now)) {
                    report("write at once with a read", byte, read);
                }
            }
            of.write = now;
            if (is_written != nullptr) {
                is_written[byte - buffer->range.begin] = true;
            }
        } else {
            if (!of.write.is_before(now)) {
                report(of.write.is_in_flight ? "read of what is in flight" : "read at once with a write", byte, of.write);
            } else if (is_dynamic && !of.write.is) {
                report("read of shared memory that nobody has written", byte, {});
            } else if (is_written != nullptr && !is_written[byte - buffer->range.begin]) {
                report("read of global memory that nobody has written", byte, {});
            }
            Access(&reads)[3] = of.reads;
            if (reads[0].is && !reads[0].is_of(now)) {
                if (reads[0].block != now.block) {
                    reads[2] = reads[0];
                } else if (reads[0].block_epoch == now.block_epoch) {
                    reads[1] = reads[0];
                }
            }
            reads[0] = now;
        }
    }
    if (instruction != nullptr) {
        note_request(at, bytes, is_shared, instruction);
    }
    state.is_on = true;
}

// Wavefronts of shared memory: a phase serves as many lanes as have 128 bytes together; it takes one
// for each different word of the busiest bank.
Cost of_banks(const Request& request) {
    const std::size_t lanes = std::max<std::size_t>(1, 128 / std::max<std::size_t>(4, request.bytes));
    Cost cost;
    for (std::size_t from = 0; from < request.at.size(); from += lanes) {
        std::array<std::set<Address>, 32> words;
        for (std::size_t i = from; i < std::min(from + lanes, request.at.size()); ++i) {
            for (Address word = request.at[i] / 4; word <= (request.at[i] + request.bytes - 1) / 4; ++word) {
                words[word % 32].insert(word);
            }
        }
        std::size_t most = 0;
        for (const auto& of_bank : words) {
            most = std::max(most, of_bank.size());
        }
        cost.paid += most;
        cost.least += 1;
    }
    return cost;
}

// Sectors of 32 bytes of global memory.
Cost of_sectors(const Request& request) {
    std::set<Address> sectors, bytes;
    for (const Address at : request.at) {
        for (Address byte = at; byte < at + request.bytes; ++byte) {
            sectors.insert(byte / 32);
            bytes.insert(byte);
        }
    }
    return {sectors.size(), (bytes.size() + 31) / 32};
}

void count_requests() {
    auto& of_kernel = state.costs[state.kernel];
    for (const auto& [_, request] : state.requests) {
        const Cost cost = request.is_shared ? of_banks(request) : of_sectors(request);
        Cost& sum = of_kernel[request.is_shared ? 0 : 1];
        sum.paid += cost.paid;
        sum.least += cost.least;
    }
    state.requests.clear();
    state.times.clear();
}

} // namespace

// ---- What emulator.h tells. ----

extern "C" {

bool hazards_pause() {
    const bool was_on = state.is_on;
    state.is_on = false;
    return was_on;
}

void hazards_go_on(bool is_on) { state.is_on = is_on; }

void hazards_launch(const char* kernel, unsigned threads) {
    state.kernel = kernel;
    state.global.clear();
    state.built_in.clear();
    state.warp_epochs.assign(threads, 0);
}

// A variable that is not in memory: threadIdx and its like.
void hazards_built_in(const void* at, std::size_t bytes) {
    const Address begin = reinterpret_cast<Address>(at);
    state.built_in.push_back({begin, begin + bytes});
}

void hazards_block(unsigned block, const void* shared, std::size_t bytes) {
    const Address begin = reinterpret_cast<Address>(shared);
    state.shared = {begin, begin + bytes};
    state.of_block.clear();
    state.now = {block, 0, 0, 0};
    std::fill(state.warp_epochs.begin(), state.warp_epochs.end(), 0);
}

void hazards_thread(unsigned thread, const void* stack, std::size_t bytes) {
    const Address begin = reinterpret_cast<Address>(stack);
    state.stack = {begin, begin + bytes};
    state.now.thread = thread;
}

// The threads that run next have met at a block's barrier, or the block has ended.
void hazards_barrier() {
    ++state.now.block_epoch;
    count_requests();
}

// The running thread has met its warp.
void hazards_warp_barrier() { ++state.warp_epochs[state.now.thread]; }

void hazards_in_flight(const void* to, std::size_t bytes) {
    visit(reinterpret_cast<Address>(to), bytes, true, nullptr, true);
}

void hazards_landed(const void* to, std::size_t bytes) {
    const bool was_on = state.is_on;
    const Address at = reinterpret_cast<Address>(to);
    for (Address byte = at; byte < at + bytes; ++byte) {
        const auto line = state.of_block.find(byte / LINE);
        if (line != state.of_block.end()) {
            (*line->second)[byte % LINE].write.is_in_flight = false;
        }
    }
    state.is_on = true;
    visit(at, bytes, true, nullptr);
    state.is_on = was_on;
}

void hazards_read(const void* at, std::size_t bytes) {
    visit(reinterpret_cast<Address>(at), bytes, false, __builtin_return_address(0));
}

void hazards_write(void* at, std::size_t bytes) {
    visit(reinterpret_cast<Address>(at), bytes, true, __builtin_return_address(0));
}

} // extern "C"

// ---- What a test tells and asks. ----

// The buffers of the next launches: where they begin, their bytes, and which of these were written, which the
// test keeps from launch to launch.
EXPORTED void hazards_buffers(const std::size_t* begins, const std::size_t* bytes, bool* const* are_written,
                              unsigned count) {
    state.buffers.clear();
    for (unsigned i = 0; i < count; ++i) {
        state.buffers.push_back({{begins[i], begins[i] + bytes[i]}, are_written[i]});
    }
}

// What was found since it was last asked, a line each; and, of each kernel, wavefronts of shared memory and
// sectors of global memory, each with the least that there could be.
EXPORTED const char* hazards_found() {
    static thread_local std::string all;
    all.clear();
    for (const std::string& one : state.found) {
        all += one + "\n";
    }
    state.found.clear();
    return all.c_str();
}

EXPORTED const char* hazards_costs() {
    static thread_local std::string all;
    all.clear();
    for (const auto& [kernel, of] : state.costs) {
        char text[256];
        std::snprintf(text, sizeof text, "%s %llu %llu %llu %llu\n", kernel.c_str(), of[0].paid, of[0].least,
                      of[1].paid, of[1].least);
        all += text;
    }
    state.costs.clear();
    return all.c_str();
}

// ---- The compiler's calls. ----

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define HERE __builtin_return_address(0)
#define ACCESS(name, bytes, is_write) \
    void __tsan_##name(void* at) { visit(reinterpret_cast<Address>(at), bytes, is_write, HERE); }
#define ACCESSES(bytes)                          \
    ACCESS(read##bytes, bytes, false)            \
    ACCESS(write##bytes, bytes, true)            \
    ACCESS(unaligned_read##bytes, bytes, false)  \
    ACCESS(unaligned_write##bytes, bytes, true)  \
    void __tsan_volatile_read##bytes(void*) {}   \
    void __tsan_volatile_write##bytes(void*) {}  \
    void __tsan_unaligned_volatile_read##bytes(void*) {} \
    void __tsan_unaligned_volatile_write##bytes(void*) {}
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

void __tsan_read_range(void* at, std::size_t bytes) { visit(reinterpret_cast<Address>(at), bytes, false, HERE); }
void __tsan_write_range(void* at, std::size_t bytes) { visit(reinterpret_cast<Address>(at), bytes, true, HERE); }

} // extern "C"
