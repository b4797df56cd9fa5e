/* The same work as terrafirma's histogram kernel, by hand: for each query, training patterns by Hamming distance.
 *
 * A tile of QUERIES x ROWS distances stays in registers while the words of the patterns pass. Compiled several times:
 *
 *   QUERIES, ROWS   shape of the tile; ROWS a multiple of 8, and 32 at most
 *   count_t         type of the counts
 *   MODE            DISTANCES   no histogram: the distances are written to a buffer, nobody reads them
 *                   PLAIN       each tile is counted when it is done
 *                   INTERLEAVED each tile is counted while the next one is computed, some rows with each word
 */
#include <immintrin.h>
#include <stdint.h>

#define DISTANCES 0
#define PLAIN 1
#define INTERLEAVED 2
#define VECTORS (ROWS / 8)

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const uint64_t *query;  /* [n_words][QUERIES] */
    const uint64_t *panel;  /* [n_words][ROWS] */
    const count_t *before;  /* [ROWS]: of the tile before */
    count_t *histogram;     /* [QUERIES][width] */
    long width;
    uint32_t (*distances)[ROWS]; /* [QUERIES][ROWS]: of the tile before, then of this one */
} tile_t;

/* Counts rows [from, from + rows) of one query; two distances to a load where there are two. */
INLINE void scatter(tile_t t, int k, long from, int rows)
{
    count_t *histogram = t.histogram + k * t.width;
    if (rows == 1)
        histogram[t.distances[k][from]] += t.before[from];
    else
        for (int j = 0; j < rows; j += 2) {
            uint64_t both;
            __builtin_memcpy(&both, &t.distances[k][from + j], 8);
            histogram[both & 0xffffffff] += t.before[from + j];
            histogram[both >> 32] += t.before[from + j + 1];
        }
}

/* Adds the distances within words [from, to), and with each counts `rows` rows of the tile before. */
INLINE void add_words(tile_t t, __m512i sums[QUERIES][VECTORS], long from, long to, int rows)
{
    for (long w = from; w < to; w++) {
        __m512i trained[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            trained[v] = _mm512_loadu_si512(t.panel + w * ROWS + 8 * v);
        for (int k = 0; k < QUERIES; k++) {
            if (rows)
                scatter(t, k, w * rows, rows);
            __m512i word = _mm512_set1_epi64((long long)t.query[w * QUERIES + k]);
            for (int v = 0; v < VECTORS; v++)
                sums[k][v] = _mm512_add_epi64(sums[k][v], _mm512_popcnt_epi64(_mm512_xor_si512(word, trained[v])));
        }
    }
}

INLINE void count_all(tile_t t)
{
    for (int j = 0; j < ROWS; j++)
        for (int k = 0; k < QUERIES; k++)
            scatter(t, k, j, 1);
}

INLINE void compute(tile_t t, long n_words, int counting)
{
    __m512i sums[QUERIES][VECTORS];
    for (int k = 0; k < QUERIES; k++)
        for (int v = 0; v < VECTORS; v++)
            sums[k][v] = _mm512_setzero_si512();
    long done = 0;
    if (counting && n_words >= ROWS)
        add_words(t, sums, 0, done = ROWS, 1);
    else if (counting && n_words >= ROWS / 2)
        add_words(t, sums, 0, done = ROWS / 2, 2);
    else if (counting && n_words >= ROWS / 4)
        add_words(t, sums, 0, done = ROWS / 4, 4);
    else if (counting)
        count_all(t);
    add_words(t, sums, done, n_words, 0);
    for (int k = 0; k < QUERIES; k++)
        for (int v = 0; v < VECTORS; v++)
            _mm256_storeu_si256((__m256i *)&t.distances[k][8 * v], _mm512_cvtepi64_epi32(sums[k][v]));
    __asm__ volatile("" : : "r"(t.distances) : "memory"); /* keeps them alive where nobody reads them */
}

/* queries [groups][n_words][QUERIES], panels [n][n_words][ROWS], counts [n][ROWS], histograms [groups * QUERIES][width];
 * the panels are visited in strips that fit in the cache. */
void count(const uint64_t *queries, long groups, const uint64_t *panels, long n, long n_words, const count_t *counts,
           count_t *histograms, long width, long strip)
{
    uint32_t distances[QUERIES][ROWS] __attribute__((aligned(64)));
    for (long start = 0; start < n; start += strip) {
        long stop = start + strip < n ? start + strip : n;
        for (long g = 0; g < groups; g++) {
            tile_t t = {queries + g * n_words * QUERIES, 0, 0, histograms + g * QUERIES * width, width, distances};
            for (long b = start; b < stop; b++) {
                t.panel = panels + b * n_words * ROWS;
                t.before = counts + (b - 1) * ROWS;
                compute(t, n_words, MODE == INTERLEAVED && b > start);
                t.before += ROWS;
                if (MODE == PLAIN || (MODE == INTERLEAVED && b == stop - 1))
                    count_all(t);
            }
        }
    }
}
