// The kernels of codecs and differences, each in one pass over memory. native.py compiles and loads this file; integers.py,
// exponents.py and sparse.py say what the formats are, and have the same in torch's operations. Encoded bytes may lie at
// any address.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define FINE 1.18920711500272106672f // 2^(1/4): from one fine scale to the next
#define NOTHING 0x1p-100f
#define MOST 0x1.fffffep127f
#define LARGEST_SCALE 0x1.020406p121f // the largest of which 127 are finite
#define AWAY 0x1p24f // numbers by whose inverse is multiplied are kept this far from fp32's end, where it loses digits
#define MAGNITUDE 0x7fffffff
#define INFINITE 0x7f800000 // the bits of magnitudes that are not finite are at least these
#define NAN_BITS 0x7fc00000 // the scale of a block in which something is not finite: all of it comes back as NaN

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
        if (largest_bits >= INFINITE) {
            store(scales, number_of(NAN_BITS));
            memset(codes + at, 0, size);
            continue;
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
    if (largest_bits >= INFINITE) {
        store(to->scale, number_of(NAN_BITS));
        memset(to->fine, 0, groups);
        memset(to->codes, 0, half);
        return;
    }
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

// ---- top-k: chunk after chunk, places, codes and two scales in bf16 --------------------------------------------------

enum { CHUNK = 4096, WHOLE_BITS = 23 }; // the most values of a chunk; the largest magnitude is a whole number of 24 bits
#define MOST_SENT 0x1.fbfffep127f // rounded to bf16, low and step still have a finite sum

static int64_t place_bytes(int64_t kept) { return 3 * ((kept + 1) / 2); }
static int64_t code_bytes(int64_t kept, int64_t bits) { return (kept * bits + 7) / 8; }
static int64_t chunk_bytes(int64_t kept, int64_t bits) { return place_bytes(kept) + code_bytes(kept, bits) + 4; }

// The magnitude that is the last to be kept, by its bits.
static int32_t last_kept(const int32_t *restrict magnitudes, int64_t width, int64_t kept) {
    int32_t found = 0;
    for (int32_t bit = 1 << 30; bit; bit >>= 1) {
        int32_t count = 0;
        for (int64_t i = 0; i < width; i++) count += magnitudes[i] >= (found | bit);
        if (count >= kept) found |= bit;
        if (count == kept) break;
    }
    return found;
}

// The places of the largest magnitudes in their order; of equal ones the first.
static void choose(const int32_t *restrict magnitudes, int64_t width, int64_t kept, int32_t *restrict places) {
    const int32_t last = last_kept(magnitudes, width, kept);
    int64_t equal = kept, found = 0;
    for (int64_t i = 0; i < width; i++) equal -= magnitudes[i] > last;
    for (int64_t i = 0; i < width && found < kept; i++)
        if (magnitudes[i] > last || (magnitudes[i] == last && equal-- > 0)) places[found++] = (int32_t)i;
}

static uint16_t bf16_of(float value) {
    const uint32_t bits = (uint32_t)bits_of(value);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float number_of_bf16(uint16_t bits) { return number_of((int32_t)((uint32_t)bits << 16)); }

static float mean_of(int64_t sum, int64_t count) { return (float)sum / (float)(count > 1 ? count : 1); }

// Two numbers that stand well for some: the means of the small and of the large ones.
static void two_means(const int32_t *restrict numbers, int64_t count, float *low, float *high) {
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += numbers[i];
    float border = mean_of(sum, count);
    for (int round = 0; round < 2; round++) {
        int64_t above = 0, sum_above = 0;
        for (int64_t i = 0; i < count; i++) {
            const int64_t is_above = (float)numbers[i] > border;
            above += is_above;
            sum_above += is_above * numbers[i];
        }
        *low = mean_of(sum - sum_above, count - above);
        *high = mean_of(sum_above, above);
        border = (*low + *high) * 0.5f;
    }
}

// Makes whole numbers of magnitudes, then levels of those; tells the scales of low and step.
static void quantise(int32_t *restrict numbers, int64_t count, int32_t levels, uint16_t scales[2]) {
    int32_t largest = 0, least_number = MAGNITUDE, largest_number = 0;
    for (int64_t i = 0; i < count; i++) largest = numbers[i] > largest ? numbers[i] : largest;
    const int32_t most = bits_of(MOST_SENT), nothing = bits_of(NOTHING) >> 23;
    int32_t exponent = (largest > most ? most : largest) >> 23;
    exponent = exponent < nothing ? nothing : exponent;
    const float unit = number_of((254 + WHOLE_BITS - exponent) << 23), from = number_of((exponent - WHOLE_BITS) << 23);
    for (int64_t i = 0; i < count; i++) {
        const int32_t number = (int32_t)(number_of(numbers[i] > most ? most : numbers[i]) * unit);
        least_number = number < least_number ? number : least_number;
        largest_number = number > largest_number ? number : largest_number;
        numbers[i] = number;
    }
    float low = (float)least_number, high = (float)largest_number;
    if (levels == 2) two_means(numbers, count, &low, &high);
    if (!least_number) low = 0;
    float step = high > low ? (high - low) / (float)(levels - 1) : 0;
    scales[0] = bf16_of(low * from);
    scales[1] = bf16_of(step * from);
    low = number_of_bf16(scales[0]) * unit;
    step = number_of_bf16(scales[1]) * unit;
    const float inverse = step > 0 ? 1.0f / step : 0, top = (float)(levels - 1);
    for (int64_t i = 0; i < count; i++) {
        float level = ((float)numbers[i] - low) * inverse;
        level = level < 0 ? 0 : level > top ? top : level;
        numbers[i] = (int32_t)rintf(level);
    }
}

static void write_chunk(const int32_t *places, const int32_t *codes, int64_t kept, int64_t bits, uint8_t *data) {
    for (int64_t i = 0; i < kept; i += 2, data += 3) {
        const int32_t second = i + 1 < kept ? places[i + 1] : 0;
        data[0] = (uint8_t)places[i];
        data[1] = (uint8_t)(places[i] >> 8 | (second & 15) << 4);
        data[2] = (uint8_t)(second >> 4);
    }
    memset(data, 0, code_bytes(kept, bits));
    for (int64_t i = 0; i < kept; i++) data[i * bits / 8] |= (uint8_t)(codes[i] << (i * bits % 8));
}

static void encode_chunk(const float *restrict values, int64_t width, int64_t kept, int64_t bits, uint8_t *data) {
    int32_t magnitudes[CHUNK], places[CHUNK], codes[CHUNK];
    uint16_t scales[2] = {NAN_BITS >> 16, NAN_BITS >> 16};
    for (int64_t i = 0; i < width; i++) magnitudes[i] = bits_of(values[i]) & MAGNITUDE;
    choose(magnitudes, width, kept, places);
    int32_t largest = 0;
    for (int64_t i = 0; i < kept; i++) {
        codes[i] = magnitudes[places[i]];
        largest = codes[i] > largest ? codes[i] : largest;
    }
    if (largest >= INFINITE) {
        memset(codes, 0, kept * sizeof *codes);
    } else {
        quantise(codes, kept, 1 << (bits - 1), scales);
        for (int64_t i = 0; i < kept; i++) codes[i] |= (values[places[i]] < 0) << (bits - 1);
    }
    write_chunk(places, codes, kept, bits, data);
    memcpy(data + chunk_bytes(kept, bits) - 4, scales, 4);
}

// `kept` values of every chunk are sent, and `last` of the last one if it is shorter.

void topk_encode(const float *values, int64_t count, int64_t chunk, int64_t kept, int64_t last, int64_t bits,
                 uint8_t *data) {
    for (int64_t at = 0; at < count; at += chunk, data += chunk_bytes(kept, bits)) {
        const int64_t width = least(chunk, count - at);
        encode_chunk(values + at, width, width < chunk ? last : kept, bits, data);
    }
}

// A place outside of the chunk, which only broken bytes can have, is left out.
static void add_chunk(const uint8_t *data, int64_t width, int64_t kept, int64_t bits, float weight, int add,
                      float *out) {
    const uint8_t *codes = data + place_bytes(kept);
    const int32_t levels = 1 << (bits - 1);
    uint16_t scales[2];
    memcpy(scales, codes + code_bytes(kept, bits), 4);
    const float low = number_of_bf16(scales[0]), step = number_of_bf16(scales[1]);
    for (int64_t i = 0; i < kept; i++) {
        const uint8_t *pair = data + 3 * (i / 2) + i % 2;
        const int32_t place = i % 2 ? pair[0] >> 4 | pair[1] << 4 : pair[0] | (pair[1] & 15) << 8;
        if (place >= width) continue;
        const int32_t code = codes[i * bits / 8] >> (i * bits % 8) & (2 * levels - 1);
        const float scaled = (float)(code & (levels - 1)) * step, size = scaled + low;
        const float value = code >= levels ? -size : size;
        out[place] = add ? out[place] + value * weight : value;
    }
}

void topk_decode(const uint8_t *data, int64_t count, int64_t chunk, int64_t kept, int64_t last, int64_t bits,
                 float weight, int32_t add, float *out) {
    for (int64_t at = 0; at < count; at += chunk, data += chunk_bytes(kept, bits)) {
        const int64_t width = least(chunk, count - at);
        if (!add) memset(out + at, 0, width * sizeof *out);
        add_chunk(data, width, width < chunk ? last : kept, bits, weight, add, out + at);
    }
}

// ---- differences: what a round needs to know of the values it sends, in the pass that makes them -------------------

#define NEAR 4096 // values that stay in the first cache
#define PIECE 65536 // values with one start among the signs: sketches.py
#define LANES 16
#define ROW 128 // values whose words are added up: checksums.py

// out = minuend - values, which may be one of them, and the sum of its squares. With signs, the sums of a sketch of it;
// with rows, the row sums of a checksum of the minuend.
void difference(const float *minuend, const float *values, float *out, int64_t count, const float *restrict signs,
                const int64_t *restrict starts, float *restrict sums, int64_t *restrict rows, double *restrict norm2) {
    double total = 0.0;
    for (int64_t at = 0; at < count; at += NEAR) {
        const int64_t size = least(NEAR, count - at), inside = at % PIECE;
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
