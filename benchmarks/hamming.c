/* The same work as terrafirma's histogram kernel, by hand: for each query, training patterns by Hamming distance.
 *
 * A tile of QUERIES x ROWS distances stays in registers while the words of the patterns pass. Compiled several times:
 *
 *   QUERIES, ROWS   shape of the tile; ROWS a multiple of 8
 *   count_t         type of the counts
 *   MODE            DISTANCES   no histogram: the distances are written to a buffer, nobody reads them
 *                   PLAIN       each tile is counted when it is done
 *                   INTERLEAVED each tile is counted while the next one is computed
 */
#include <immintrin.h>
#include <stdint.h>

#define DISTANCES 0
#define PLAIN 1
#define INTERLEAVED 2
#define VECTORS (ROWS / 8)
#define AHEAD 8 /* words over which the counting of the tile before is spread */

#define INLINE static inline __attribute__((always_inline))

INLINE void add_word(__m512i sums[QUERIES][VECTORS], const uint64_t *query, const uint64_t *panel)
{
    __m512i rows[VECTORS];
    for (int v = 0; v < VECTORS; v++)
        rows[v] = _mm512_loadu_si512(panel + 8 * v);
    for (int k = 0; k < QUERIES; k++) {
        __m512i word = _mm512_set1_epi64((long long)query[k]);
        for (int v = 0; v < VECTORS; v++)
            sums[k][v] = _mm512_add_epi64(sums[k][v], _mm512_popcnt_epi64(_mm512_xor_si512(word, rows[v])));
    }
}

INLINE void scatter(uint32_t distances[QUERIES][ROWS], const count_t *counts, count_t *histograms, long width,
                    int from, int to)
{
    for (int j = from; j < to; j++)
        for (int k = 0; k < QUERIES; k++)
            histograms[k * width + distances[k][j]] += counts[j];
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
            const uint64_t *query = queries + g * n_words * QUERIES;
            count_t *histogram = histograms + g * QUERIES * width;
            for (long b = start; b < stop; b++) {
                const uint64_t *panel = panels + b * n_words * ROWS;
                const count_t *before = counts + (b - 1) * ROWS;
                __m512i sums[QUERIES][VECTORS];
                for (int k = 0; k < QUERIES; k++)
                    for (int v = 0; v < VECTORS; v++)
                        sums[k][v] = _mm512_setzero_si512();
                long w = 0;
                if (MODE == INTERLEAVED && b > start && n_words >= AHEAD)
                    for (; w < AHEAD; w++) {
                        add_word(sums, query + w * QUERIES, panel + w * ROWS);
                        scatter(distances, before, histogram, width, w * ROWS / AHEAD, (w + 1) * ROWS / AHEAD);
                    }
                else if (MODE == INTERLEAVED && b > start)
                    scatter(distances, before, histogram, width, 0, ROWS);
                for (; w < n_words; w++)
                    add_word(sums, query + w * QUERIES, panel + w * ROWS);
                for (int k = 0; k < QUERIES; k++)
                    for (int v = 0; v < VECTORS; v++)
                        _mm256_storeu_si256((__m256i *)&distances[k][8 * v], _mm512_cvtepi64_epi32(sums[k][v]));
                __asm__ volatile("" : : "r"(distances) : "memory"); /* keeps them alive where nobody reads them */
                if (MODE == PLAIN)
                    scatter(distances, counts + b * ROWS, histogram, width, 0, ROWS);
            }
            if (MODE == INTERLEAVED)
                scatter(distances, counts + (stop - 1) * ROWS, histogram, width, 0, ROWS);
        }
    }
}
