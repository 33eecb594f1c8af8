# The scan's inner loops over one tile of W channels; included by _scan.pyx, which says how it all fits.

cdef inline void load_rows(float *dst, const float *src, Py_ssize_t stride, Py_ssize_t steps,
                           Py_ssize_t width) noexcept nogil:
    """`width` channels of `steps` rows into a [steps][W] buffer, the rest of a row zero."""
    cdef Py_ssize_t t
    if width == W:
        for t in range(steps):
            memcpy(dst + t * W, src + t * stride, W * sizeof(float))
    else:
        for t in range(steps):
            memcpy(dst + t * W, src + t * stride, width * sizeof(float))
            memset(dst + t * W + width, 0, (W - width) * sizeof(float))


cdef inline void store_rows(float *dst, Py_ssize_t stride, const float *src, Py_ssize_t steps,
                            Py_ssize_t width) noexcept nogil:
    cdef Py_ssize_t t
    for t in range(steps):
        memcpy(dst + t * stride, src + t * W, width * sizeof(float))


cdef inline void clear_rows(float *dst, Py_ssize_t stride, Py_ssize_t steps, Py_ssize_t width) noexcept nogil:
    cdef Py_ssize_t t
    for t in range(steps):
        memset(dst + t * stride, 0, width * sizeof(float))


cdef inline void load_weights(float *dst, const float *src, Py_ssize_t stride, Py_ssize_t steps, Py_ssize_t N,
                              Py_ssize_t pairs) noexcept nogil:
    """Rows of b or c into [steps][2 * pairs], zero for the state that makes an odd N even."""
    cdef Py_ssize_t t
    for t in range(steps):
        dst[t * 2 * pairs + 2 * pairs - 1] = 0
        memcpy(dst + t * 2 * pairs, src + t * stride, N * sizeof(float))


cdef inline const float *offset(const float *p, Py_ssize_t elements) noexcept nogil:
    """p + elements, NULL staying NULL."""
    if p == NULL:
        return NULL
    return p + elements


cdef inline void load_vector(float *dst, const float *src, Py_ssize_t width) noexcept nogil:
    """A per-channel vector, or zeros where there is none."""
    memset(dst, 0, W * sizeof(float))
    if src != NULL:
        memcpy(dst, src, width * sizeof(float))


cdef void load_decay(float *a2, float *ia, float *a1, float *low, float *high, const Job *job, Py_ssize_t first,
                     Py_ssize_t width) noexcept nogil:
    """A of a tile as [2 * pairs][W]: times log2(e), its inverse, and (a1 not NULL) itself; and the range of
    Delta in which no exp(Delta A) of the channel overflows."""
    cdef Py_ssize_t n, j
    cdef float a, most, least
    for j in range(W):
        most = 0.0
        least = 0.0
        for n in range(2 * job.pairs):
            a = job.a[(first + j) * job.a_e + n] if j < width and n < job.N else -1.0
            if a != a:
                a = NAN         # without its sign, which mf_exp2_parts asks for
            elif mf_abs(a) < SMALLEST_A:
                a = SMALLEST_A if a > 0 else -SMALLEST_A
            a2[n * W + j] = a * MF_LOG2E
            ia[n * W + j] = <float> 1.0 / a
            if a1 != NULL:
                a1[n * W + j] = a
            most = max(most, a2[n * W + j])
            least = min(least, a2[n * W + j])
        high[j] = <float> 127.0 / most if most > 0 else INFINITY
        low[j] = <float> 127.0 / least if least < 0 else -INFINITY


cdef inline void load_state(float *h, const float *src, Py_ssize_t stride, const Job *job,
                            Py_ssize_t width) noexcept nogil:
    """A (width, N) block into [2 * pairs][W]; zeros where there is none."""
    cdef Py_ssize_t n, j
    memset(h, 0, 2 * job.pairs * W * sizeof(float))
    if src != NULL:
        for j in range(width):
            for n in range(job.N):
                h[n * W + j] = src[j * stride + n]


cdef inline void store_state(float *dst, Py_ssize_t stride, const float *h, Py_ssize_t N,
                             Py_ssize_t width) noexcept nogil:
    cdef Py_ssize_t n, j
    for j in range(width):
        for n in range(N):
            dst[j * stride + n] = h[n * W + j]


cdef inline void make_delta(mf_out delta, mf_in bias, mf_in low, mf_in high, Py_ssize_t steps,
                            bint softplus) noexcept nogil:
    """Delta from its raw value, in place. A NaN loses its sign, which mf_exp2_parts asks for."""
    cdef Py_ssize_t t, j
    cdef float x
    for t in range(steps):
        if softplus:
            for j in range(W):
                delta[t * W + j] = mf_softplus(delta[t * W + j] + bias[j])
        else:
            for j in range(W):
                delta[t * W + j] = delta[t * W + j] + bias[j]
        for j in range(W):
            x = delta[t * W + j]
            x = low[j] if x < low[j] else x
            delta[t * W + j] = x
        for j in range(W):
            x = delta[t * W + j]
            x = high[j] if high[j] < x else x
            delta[t * W + j] = x
        for j in range(W):
            x = delta[t * W + j]
            delta[t * W + j] = NAN if x != x else x


cdef inline void skip_rows(mf_out y, mf_in u, mf_in skip, Py_ssize_t steps) noexcept nogil:
    cdef Py_ssize_t t, j
    for t in range(steps):
        for j in range(W):
            y[t * W + j] = u[t * W + j] * skip[j]


cdef inline void multiply_rows(mf_out x, mf_in factor, Py_ssize_t steps) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(steps * W):
        x[i] *= factor[i]


cdef inline void gate_rows(mf_out y, mf_in z, Py_ssize_t steps) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(steps * W):
        y[i] *= z[i] * mf_sigmoid(z[i])


# ---- restarts -----------------------------------------------------------------------------------

cdef struct Segments:
    # the runs of steps of a chunk between restarts: run i is [at[i], at[i + 1]), and starts from the
    # state 0 where fresh[i]
    Py_ssize_t count
    Py_ssize_t[33] at       # T + 1
    bint[32] fresh          # T


cdef void find_segments(Segments *segments, const Job *job, Py_ssize_t batch, Py_ssize_t t0,
                        Py_ssize_t steps) noexcept nogil:
    cdef Py_ssize_t t
    cdef ints start = NULL
    if job.seq_start != NULL:
        start = job.seq_start + batch * job.seq_b + t0
    segments.count = 1
    segments.at[0] = 0
    segments.fresh[0] = start != NULL and start[0] != 0
    if start != NULL:
        for t in range(1, steps):
            if start[t]:
                segments.at[segments.count] = t
                segments.fresh[segments.count] = True
                segments.count += 1
    segments.at[segments.count] = steps


# ---- forward, two states of LANES channels at a time ----------------------------------------------
#
# The states, A and 1/A are small local arrays: after the compiler has turned the loops over lanes into
# vectors they live in registers along t. Two states share the loads of Delta, u and y and give the
# processor two independent chains of dependent steps.

cdef inline float advance(float s, float p, float h, float u, float b, float ia, bint zoh) noexcept nogil:
    """h one step on, with exp(Delta A) = s (1 + p); `u` is Delta u for euler."""
    if zoh:
        return s * (p * h + h) + (s * p + (s - <float> 1.0)) * (u * b * ia)
    return s * (p * h + h) + u * b


cdef inline void scan_pair(Py_ssize_t steps, mf_in delta, mf_in x, mf_out y, mf_in b, mf_in c, Py_ssize_t stride,
                           const float *a2, const float *ia, float *h, bint zoh) noexcept nogil:
    cdef Py_ssize_t t, j
    cdef float b0, b1, c0, c1, d, s, p
    cdef float[LANES] h0
    cdef float[LANES] h1
    cdef float[LANES] a0
    cdef float[LANES] a1
    cdef float[LANES] i0
    cdef float[LANES] i1
    for j in range(LANES):
        h0[j] = h[j]
        h1[j] = h[W + j]
        a0[j] = a2[j]
        a1[j] = a2[W + j]
        i0[j] = ia[j]
        i1[j] = ia[W + j]
    for t in range(steps):
        b0 = b[t * stride]
        b1 = b[t * stride + 1]
        c0 = c[t * stride]
        c1 = c[t * stride + 1]
        for j in range(LANES):
            d = delta[t * W + j]
            mf_exp2_parts(d * a0[j], &s, &p)
            h0[j] = advance(s, p, h0[j], x[t * W + j], b0, i0[j], zoh)
            mf_exp2_parts(d * a1[j], &s, &p)
            h1[j] = advance(s, p, h1[j], x[t * W + j], b1, i1[j], zoh)
            y[t * W + j] += h0[j] * c0 + h1[j] * c1
    for j in range(LANES):
        h[j] = h0[j]
        h[W + j] = h1[j]


cdef void scan_pair_zoh(Py_ssize_t steps, mf_in delta, mf_in x, mf_out y, mf_in b, mf_in c, Py_ssize_t stride,
                        const float *a2, const float *ia, float *h) noexcept nogil:
    scan_pair(steps, delta, x, y, b, c, stride, a2, ia, h, True)


cdef void scan_pair_euler(Py_ssize_t steps, mf_in delta, mf_in x, mf_out y, mf_in b, mf_in c, Py_ssize_t stride,
                          const float *a2, const float *ia, float *h) noexcept nogil:
    scan_pair(steps, delta, x, y, b, c, stride, a2, ia, h, False)


cdef void scan_tile(const Job *job, const Segments *segments, const float *delta, const float *x, float *y,
                    const float *b, const float *c, const float *a2, const float *ia, float *h) noexcept nogil:
    """Advance all states of a tile over one chunk; y[t] += sum_n c[t][n] h[t][n]."""
    cdef Py_ssize_t i, t, n, pair, block, lane, steps, stride = 2 * job.pairs
    for i in range(segments.count):
        t = segments.at[i]
        steps = segments.at[i + 1] - t
        if segments.fresh[i]:
            memset(h, 0, stride * W * sizeof(float))
        for pair in range(job.pairs):
            n = 2 * pair
            for block in range(W // LANES):
                lane = block * LANES
                job.scan_pair(steps, delta + t * W + lane, x + t * W + lane, y + t * W + lane, b + t * stride + n,
                              c + t * stride + n, stride, a2 + n * W + lane, ia + n * W + lane, h + n * W + lane)
