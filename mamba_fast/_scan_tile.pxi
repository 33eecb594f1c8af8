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


cdef inline const float *offset(const float *p, Py_ssize_t elements) noexcept nogil:
    """p + elements, NULL staying NULL."""
    if p == NULL:
        return NULL
    return p + elements


cdef inline ints restarts(const Job *job, Py_ssize_t batch, Py_ssize_t t0) noexcept nogil:
    if job.seq_start == NULL:
        return NULL
    return job.seq_start + batch * job.seq_b + t0


cdef inline void load_vector(float *dst, const float *src, Py_ssize_t width) noexcept nogil:
    """A per-channel vector, or zeros where there is none."""
    memset(dst, 0, W * sizeof(float))
    if src != NULL:
        memcpy(dst, src, width * sizeof(float))


cdef inline void make_delta(mf_out delta, mf_in bias, Py_ssize_t steps, bint softplus) noexcept nogil:
    """Delta from its raw value, in place."""
    cdef Py_ssize_t t, j
    if softplus:
        for t in range(steps):
            for j in range(W):
                delta[t * W + j] = mf_softplus(delta[t * W + j] + bias[j])
    else:
        for t in range(steps):
            for j in range(W):
                delta[t * W + j] = delta[t * W + j] + bias[j]


cdef inline void load_decay(float *a2, float *ia, float *a1, const Job *job, Py_ssize_t first,
                            Py_ssize_t width) noexcept nogil:
    """A of a tile as [N][W]: times log2(e), its inverse, and (a1 not NULL) itself."""
    cdef Py_ssize_t n, j
    cdef float a
    for n in range(job.N):
        for j in range(W):
            a = job.a[(first + j) * job.a_e + n] if j < width else -1.0
            if mf_abs(a) < SMALLEST_A:
                a = SMALLEST_A if a > 0 else -SMALLEST_A
            a2[n * W + j] = a * MF_LOG2E
            ia[n * W + j] = 1.0 / a
            if a1 != NULL:
                a1[n * W + j] = a


cdef inline void load_state(float *h, const float *src, Py_ssize_t stride, Py_ssize_t N,
                            Py_ssize_t width) noexcept nogil:
    """A (width, N) block into [N][W]; zeros where there is none."""
    cdef Py_ssize_t n, j
    memset(h, 0, N * W * sizeof(float))
    if src != NULL:
        for j in range(width):
            for n in range(N):
                h[n * W + j] = src[j * stride + n]


cdef inline void store_state(float *dst, Py_ssize_t stride, const float *h, Py_ssize_t N,
                             Py_ssize_t width) noexcept nogil:
    cdef Py_ssize_t n, j
    for j in range(width):
        for n in range(N):
            dst[j * stride + n] = h[n * W + j]


cdef inline float advance(float s, float p, float h, float u, float b, float ia, bint zoh) noexcept nogil:
    """h one step on, with exp(Delta A) = s (1 + p); `u` is Delta u for euler."""
    if zoh:
        return s * (p * h + h) + (s * p + (s - <float> 1.0)) * (u * b * ia)
    return s * (p * h + h) + u * b


cdef inline void advance_zoh(mf_in delta, mf_in u, mf_in a2, mf_in ia, float b, mf_out h) noexcept nogil:
    cdef Py_ssize_t j
    cdef float s, p
    for j in range(W):
        mf_exp2_parts(delta[j] * a2[j], &s, &p)
        h[j] = advance(s, p, h[j], u[j], b, ia[j], True)


cdef inline void advance_euler(mf_in delta, mf_in x, mf_in a2, float b, mf_out h) noexcept nogil:
    cdef Py_ssize_t j
    cdef float s, p
    for j in range(W):
        mf_exp2_parts(delta[j] * a2[j], &s, &p)
        h[j] = advance(s, p, h[j], x[j], b, 0.0, False)


cdef inline void add_scaled(mf_out y, mf_in h, float c) noexcept nogil:
    cdef Py_ssize_t j
    for j in range(W):
        y[j] += h[j] * c


cdef void scan_tile(const Job *job, const float *delta, const float *x, float *y, const float *b,
                    const float *c, const float *a2, const float *ia, float *h, ints start,
                    Py_ssize_t steps) noexcept nogil:
    """Advance all N states of a tile over one chunk; y[t] += sum_n c[t][n] h[t][n]."""
    cdef Py_ssize_t n, t
    cdef float *state
    for n in range(job.N):
        state = h + n * W
        for t in range(steps):
            if start != NULL and start[t]:
                memset(state, 0, W * sizeof(float))
            if job.zoh:
                advance_zoh(delta + t * W, x + t * W, a2 + n * W, ia + n * W, b[t * job.b_t + n], state)
            else:
                advance_euler(delta + t * W, x + t * W, a2 + n * W, b[t * job.b_t + n], state)
            add_scaled(y + t * W, state, c[t * job.c_t + n])


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
