// The kernels of codecs and differences, each in one pass over memory. native.py compiles and loads this file; integers.py
// and exponents.py say what the formats are, and have the same in torch's operations. Encoded bytes may lie at any address.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define FINE 1.18920711500272106672f // 2^(1/4): from one fine scale to the next
#define NOTHING 0x1p-100f
#define MOST 0x1.fffffep127f
#define LARGEST_SCALE 0x1.020406p121f // the largest of which 127 are finite
#define AWAY 0x1p24f // numbers by whose inverse is multiplied are kept this far from fp32's end, where it loses digits
#define MAGNITUDE 0x7fffffff

static inline int32_t bits_of(float value) { int32_t bits; memcpy(&bits, &value, 4); return bits; }
static inline float number_of(int32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline float load(const uint8_t *place) { float value; memcpy(&value, place, 4); return value; }
static inline void store(uint8_t *place, float value) { memcpy(place, &value, 4); }
static inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

// ---- int8: all scales, then all integers ---------------------------------------------------------------------------

void int8_encode(const float *restrict values, int64_t count, int64_t block, uint8_t *restrict data) {
    uint8_t *scales = data;
    int8_t *codes = (int8_t *)(data + 4 * ((count + block - 1) / block));
    for (int64_t at = 0; at < count; at += block, scales += 4) {
        const int64_t size = least(block, count - at);
        int32_t largest_bits = 0; // magnitudes are in the order of their bits
        for (int64_t i = 0; i < size; i++) {
            const int32_t bits = bits_of(values[at + i]) & MAGNITUDE;
            largest_bits = bits > largest_bits ? bits : largest_bits;
        }
        const float largest = number_of(largest_bits);
        const float scale = largest / 127.0f;
        store(scales, scale > LARGEST_SCALE ? LARGEST_SCALE : scale);
        const float factor = 1.0f / ((largest < NOTHING ? NOTHING : largest) / AWAY) * (127.0f / AWAY);
        for (int64_t i = 0; i < size; i++) codes[at + i] = (int8_t)(int32_t)rintf(values[at + i] * factor);
    }
}

void int8_decode(const uint8_t *restrict data, int64_t count, int64_t block, float *restrict out) {
    const uint8_t *scales = data;
    const int8_t *codes = (const int8_t *)(data + 4 * ((count + block - 1) / block));
    for (int64_t at = 0; at < count; at += block, scales += 4) {
        const int64_t size = least(block, count - at);
        const float scale = load(scales);
        for (int64_t i = 0; i < size; i++) out[at + i] = (float)codes[at + i] * scale;
    }
}

void int8_decode_add(const uint8_t *restrict data, int64_t count, int64_t block, float weight, float *restrict out) {
    const uint8_t *scales = data;
    const int8_t *codes = (const int8_t *)(data + 4 * ((count + block - 1) / block));
    for (int64_t at = 0; at < count; at += block, scales += 4) {
        const int64_t size = least(block, count - at);
        const float scale = load(scales) * weight;
        for (int64_t i = 0; i < size; i++) out[at + i] += (float)codes[at + i] * scale;
    }
}

// ---- E3M0: all blocks' scales, then all groups' scales, then all codes ----------------------------------------------

enum { GROUP = 16, MOST_GROUPS = 65536 / GROUP, SCALES = 256 };

static float powers[SCALES], inverses[SCALES]; // 2^(c/4) over 2^24, and 1 over 2^(c/4)

__attribute__((constructor)) static void fill_tables(void) {
    for (int c = 0; c < SCALES; c++) {
        powers[c] = (float)exp2(c / 4.0) / AWAY;
        inverses[c] = (float)exp2(-c / 4.0);
    }
}

// A block as a matrix with the values of a group in a column. Zeros fill the last one up if it is shorter.
typedef struct {
    int64_t size, groups, rows;
    uint8_t *scale, *fine, *codes;
} Block;

static Block block_at(int64_t at, int64_t count, int64_t block, uint8_t *data) {
    const int64_t blocks = count / block, rest = count % block, groups = block / GROUP, index = at / block;
    Block found = {block, groups, GROUP, data + 4 * index, 0, 0};
    int64_t last_groups = 0;
    if (rest) {
        last_groups = least(groups, rest + rest % 2);
        if (index == blocks) {
            found.size = rest;
            found.groups = last_groups;
            found.rows = (rest + last_groups - 1) / last_groups;
            found.rows += found.rows * last_groups % 2;
        }
    }
    uint8_t *fine = data + 4 * (blocks + (rest > 0));
    found.fine = fine + groups * index;
    found.codes = fine + groups * blocks + last_groups + block / 2 * index;
    return found;
}

static inline float nearest_power(float value) { return number_of((bits_of(value) + (1 << 22)) & (int32_t)0xff800000); }

static inline uint8_t code_of(float scaled) {
    const int32_t bits = bits_of(scaled), magnitude = bits & MAGNITUDE;
    int32_t exponent = ((magnitude + (1 << 22)) >> 23) - 120; // of the nearest power of two; 7 is that of the scale
    exponent = exponent < 1 ? 1 : exponent > 7 ? 7 : exponent;
    exponent = magnitude < 0x3c000000 ? 0 : exponent; // below 2^-7
    return (uint8_t)(exponent | (bits < 0 ? 8 : 0));
}

static inline float level_of(int32_t code) {
    const int32_t exponent = code & 7;
    return number_of((exponent ? (exponent + 120) << 23 : 0) | (int32_t)((uint32_t)(code & 8) << 28));
}

// The first scale that is at most 2^(1/4) times a group's largest magnitude, in quarter octaves below the block's.
static inline int32_t first_scale(float ratio) {
    const int32_t bits = bits_of(ratio > 0x1p-64f ? ratio : 0x1p-64f), mantissa = bits & 0x7fffff;
    const int32_t above = (mantissa >= 0x1837f1) + (mantissa >= 0x3504f4) + (mantissa >= 0x5744fd); // 2^(1/4) and so on
    const int32_t quarters = 4 * ((bits >> 23) - 127) + above;
    return quarters > 0 ? 0 : quarters < -254 ? 254 : -quarters;
}

static void encode_block(const float *restrict values, const Block *to, float *restrict units,
                         uint8_t *restrict nibbles) {
    int32_t top[MOST_GROUPS], chosen[MOST_GROUPS];
    float power[MOST_GROUPS], by_first[MOST_GROUPS], by_next[MOST_GROUPS];
    const int64_t groups = to->groups, rows = to->rows, half = rows * groups / 2;
    memset(top, 0, groups * sizeof *top);
    memset(by_first, 0, groups * sizeof *by_first);
    memset(by_next, 0, groups * sizeof *by_next);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t g = 0; g < groups; g++) {
            const int32_t bits = bits_of(values[r * groups + g]) & MAGNITUDE;
            top[g] = bits > top[g] ? bits : top[g];
        }
    int32_t largest_bits = 0;
    for (int64_t g = 0; g < groups; g++) largest_bits = top[g] > largest_bits ? top[g] : largest_bits;
    float largest = number_of(largest_bits), scale = largest * FINE;
    store(to->scale, scale > MOST ? MOST : scale);
    largest = largest < NOTHING ? NOTHING : largest;
    scale = largest * FINE;
    const float unit = 1.0f / ((scale > MOST ? MOST : scale) / AWAY);
    for (int64_t g = 0; g < groups; g++) chosen[g] = first_scale(number_of(top[g]) / largest);
    for (int64_t g = 0; g < groups; g++) power[g] = powers[chosen[g]];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t g = 0; g < groups; g++) {
            const float value = values[r * groups + g] * unit, scaled = value * power[g], next = scaled * FINE;
            const float lost = nearest_power(scaled) - scaled, lost_next = nearest_power(next) - next;
            units[r * groups + g] = value;
            by_first[g] += lost * lost;
            by_next[g] += lost_next * lost_next;
        }
    for (int64_t g = 0; g < groups; g++) {
        chosen[g] += by_next[g] * (1.0f / (FINE * FINE)) < by_first[g];
        to->fine[g] = (uint8_t)chosen[g];
        power[g] = powers[chosen[g]];
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t g = 0; g < groups; g++) nibbles[r * groups + g] = code_of(units[r * groups + g] * power[g]);
    for (int64_t i = 0; i < half; i++) to->codes[i] = (uint8_t)(nibbles[i] | nibbles[i + half] << 4);
}

static void decode_block(const Block *from, float weight, float *restrict values) {
    float scales[MOST_GROUPS];
    const int64_t groups = from->groups, rows = from->rows, half = rows * groups / 2;
    const float whole = load(from->scale) * weight;
    const uint8_t *restrict codes = from->codes;
    for (int64_t g = 0; g < groups; g++) scales[g] = inverses[from->fine[g]] * whole;
    for (int64_t i = 0; i < half; i++) values[i] = level_of(codes[i]);
    for (int64_t i = 0; i < half; i++) values[i + half] = level_of(codes[i] >> 4);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t g = 0; g < groups; g++) values[r * groups + g] *= scales[g];
}

// `scratch` holds three blocks of floats in these.

void e3m0_encode(const float *restrict values, int64_t count, int64_t block, uint8_t *data, float *scratch) {
    float *filled = scratch + 2 * block;
    for (int64_t at = 0; at < count; at += block) {
        const Block to = block_at(at, count, block, data);
        const float *from = values + at;
        const int64_t room = to.groups * to.rows;
        if (to.size < room) {
            memcpy(filled, from, to.size * sizeof *filled);
            memset(filled + to.size, 0, (room - to.size) * sizeof *filled);
            from = filled;
        }
        encode_block(from, &to, scratch, (uint8_t *)(scratch + block));
    }
}

void e3m0_decode(uint8_t *data, int64_t count, int64_t block, float *restrict out, float *restrict scratch) {
    for (int64_t at = 0; at < count; at += block) {
        const Block from = block_at(at, count, block, data);
        decode_block(&from, 1.0f, scratch);
        memcpy(out + at, scratch, from.size * sizeof *out);
    }
}

void e3m0_decode_add(uint8_t *data, int64_t count, int64_t block, float weight, float *restrict out,
                     float *restrict scratch) {
    for (int64_t at = 0; at < count; at += block) {
        const Block from = block_at(at, count, block, data);
        decode_block(&from, weight, scratch);
        for (int64_t i = 0; i < from.size; i++) out[at + i] += scratch[i];
    }
}

// ---- differences: what a round needs to know of the values it sends, in the pass that makes them -------------------

#define CHUNK 4096 // values that stay in the first cache
#define PIECE 65536 // values with one start among the signs: sketches.py
#define LANES 16
#define ROW 128 // values whose words are added up: checksums.py

// out = minuend - values, which may be one of them, and the sum of its squares. With signs, the sums of a sketch of it;
// with rows, the row sums of a checksum of the minuend.
void difference(const float *minuend, const float *values, float *out, int64_t count, const float *restrict signs,
                const int64_t *restrict starts, float *restrict sums, int64_t *restrict rows, double *restrict norm2) {
    double total = 0.0;
    for (int64_t at = 0; at < count; at += CHUNK) {
        const int64_t size = least(CHUNK, count - at), inside = at % PIECE;
        if (rows)
            for (int64_t row = 0; row < size / ROW; row++) {
                uint64_t words[ROW / 2], sum = 0;
                memcpy(words, minuend + at + row * ROW, sizeof words);
                for (int i = 0; i < ROW / 2; i++) sum += words[i];
                rows[inside / ROW + row] = (int64_t)((uint64_t)rows[inside / ROW + row] + sum);
            }
        float lanes[LANES] = {0};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
#pragma GCC ivdep
            for (int lane = 0; lane < LANES; lane++) {
                const float value = minuend[at + i + lane] - values[at + i + lane];
                out[at + i + lane] = value;
                lanes[lane] += value * value;
            }
        for (; i < size; i++) {
            const float value = minuend[at + i] - values[at + i];
            out[at + i] = value;
            lanes[0] += value * value;
        }
        for (int lane = 0; lane < LANES; lane++) total += lanes[lane];
        if (signs) {
            const float *sign = signs + starts[at / PIECE] + inside;
            for (i = 0; i < size; i++) sums[inside + i] += out[at + i] * sign[i];
        }
    }
    *norm2 = total;
}
