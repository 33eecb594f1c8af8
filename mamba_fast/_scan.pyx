# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, freethreading_compatible=True
"""The selective scan: forward, backward and single step, in float32.

Formulas: SPEC 2.6 to 2.10 and 3 (Gu and Dao 2023, algorithm 2), with the gate and the D skip.

Design
------
Memory. Tensors are (B, L, E), channels last. No (B, L, E, N) array exists: the forward pass keeps
the state at the start of every T steps (B * L * E * N / T floats), from which the backward pass
recomputes T steps at a time into a buffer that stays in cache.

Vectors. The inner loops run over a tile of W channels, for one state n, with the state in a small
array along t; the compiler turns them into vector code. Vectors over n would fit N = 16 only, and
need a horizontal sum each step. A tail of fewer than W channels is padded with zeros, which add
nothing.

Tasks. One task is one batch row and one slab of channels. Its partial sums (dB, dC over its
channels; dA, dD and the bias's gradient over its time steps) go to buffers of its own and are added
up in a fixed order afterwards, and the slab width depends on the shape alone: the bits of a result
do not depend on the number of threads.

Accuracy. exp(z), z = Delta A, is kept as s (1 + p) with s a power of two: h decays to s (p h + h),
which neither rounds a decay near 1 (an error that would be the same each step, and add up over the
memory of the state) nor loses the digits of one near 0; so does its gradient on the way back. The
input is weighed by expm1(z) / A = (s p + (s - 1)) / A, which does not cancel. |A| is taken as at
least 1e-12, where the difference from 0 is beyond float32 for every Delta. The A gradient needs
Delta^2 phi'(z), by a polynomial for |z| below ln(2)/2 and by the closed form above. softplus'(x)
comes as -expm1(-softplus(x)), which is exact for small Delta and saves keeping x.
"""

from libc.stdlib cimport malloc, free
from libc.string cimport memcpy, memset
from libc.stdint cimport uintptr_t

from mamba_fast._threads cimport parallel_for

cdef extern from "_vecmath.h" nogil:
    ctypedef float *mf_out
    ctypedef const float *mf_in
    float MF_LOG2E
    float mf_abs(float)
    void mf_exp2_parts(float, float *s, float *p)
    float mf_exp2m1(float)
    float mf_sigmoid(float)
    float mf_softplus(float)
    float mf_phi_prime_near_zero(float)

cdef enum:
    T = 32              # steps between kept states
    W = 64              # channels in a tile
    LANES = 16          # lanes of the partial sums of dB and dC; divides W
    WIDE_SLAB = 256     # channels in a task: a multiple of W
    SERIAL_BELOW = 32768    # state updates below which threads cost more than they save

ctypedef const int *ints

cdef float SMALLEST_A = 1e-12
cdef float SERIES_BELOW = 0.34657359   # ln(2) / 2


cdef struct Job:
    Py_ssize_t B, L, E, N
    Py_ssize_t slab, n_slabs, n_chunks
    bint softplus, zoh
    # inputs; *_b and *_t are strides in elements along batch and time
    const float *u
    Py_ssize_t u_b, u_t
    const float *delta
    Py_ssize_t delta_b, delta_t
    const float *b
    Py_ssize_t b_b, b_t
    const float *c
    Py_ssize_t c_b, c_t
    const float *z
    Py_ssize_t z_b, z_t
    const float *a
    Py_ssize_t a_e
    const float *d
    const float *bias
    const float *initial
    Py_ssize_t initial_b, initial_e
    ints seq_start
    Py_ssize_t seq_b
    ints lengths
    # forward outputs
    float *y
    Py_ssize_t y_b, y_t
    float *final
    Py_ssize_t final_b, final_e
    float *checkpoints          # (B, n_chunks, N, E), or NULL
    # backward
    const float *dy
    Py_ssize_t dy_b, dy_t
    const float *d_final
    Py_ssize_t d_final_b, d_final_e
    float *du
    Py_ssize_t du_b, du_t
    float *ddelta
    Py_ssize_t ddelta_b, ddelta_t
    float *dz
    Py_ssize_t dz_b, dz_t
    float *db
    Py_ssize_t db_b, db_t
    float *dc
    Py_ssize_t dc_b, dc_t
    float *d_initial
    Py_ssize_t d_initial_b, d_initial_e
    float *part_db              # (n_slabs, B, L, N)
    float *part_dc
    float *part_da              # (B, N, E)
    float *part_dd              # (B, E)
    float *part_dbias           # (B, E)
    # one block of scratch for each thread
    float *scratch
    Py_ssize_t scratch_floats


# ---- one tile of W channels ---------------------------------------------------------------------

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


# ---- forward ------------------------------------------------------------------------------------

cdef Py_ssize_t forward_scratch(Py_ssize_t slab, Py_ssize_t N) noexcept nogil:
    return 3 * slab * N + 2 * slab + 4 * T * W


cdef void forward_task(void *context, Py_ssize_t task, int worker) noexcept nogil:
    cdef Job *job = <Job *> context
    cdef Py_ssize_t N = job.N, E = job.E
    cdef Py_ssize_t batch = task // job.n_slabs
    cdef Py_ssize_t slab_start = (task % job.n_slabs) * job.slab
    cdef Py_ssize_t slab_end = min(slab_start + job.slab, E)
    cdef Py_ssize_t tiles = (slab_end - slab_start + W - 1) // W
    cdef Py_ssize_t length = job.lengths[batch] if job.lengths != NULL else job.L
    cdef Py_ssize_t chunk, t0, steps, first, width, k, n, i, t, j
    cdef float *a2 = job.scratch + worker * job.scratch_floats
    cdef float *ia = a2 + job.slab * N
    cdef float *h = ia + job.slab * N
    cdef float *bias = h + job.slab * N
    cdef float *skip = bias + job.slab
    cdef float *delta = skip + job.slab
    cdef float *x = delta + T * W
    cdef float *y = x + T * W
    cdef float *gate = y + T * W
    cdef float *kept
    cdef ints start

    for k in range(tiles):
        first = slab_start + k * W
        width = min(<Py_ssize_t> W, slab_end - first)
        load_decay(a2 + k * N * W, ia + k * N * W, NULL, job, first, width)
        load_state(h + k * N * W,
                   offset(job.initial, batch * job.initial_b + first * job.initial_e),
                   job.initial_e, N, width)
        load_vector(bias + k * W, offset(job.bias, first), width)
        load_vector(skip + k * W, offset(job.d, first), width)

    for chunk in range(job.n_chunks):
        t0 = chunk * T
        if t0 >= length:
            break
        steps = min(<Py_ssize_t> T, length - t0)
        start = restarts(job, batch, t0)
        for k in range(tiles):
            first = slab_start + k * W
            width = min(<Py_ssize_t> W, slab_end - first)
            if job.checkpoints != NULL:
                kept = job.checkpoints + (batch * job.n_chunks + chunk) * N * E + first
                for n in range(N):
                    memcpy(kept + n * E, h + (k * N + n) * W, width * sizeof(float))
            load_rows(delta, job.delta + batch * job.delta_b + t0 * job.delta_t + first, job.delta_t, steps, width)
            load_rows(x, job.u + batch * job.u_b + t0 * job.u_t + first, job.u_t, steps, width)
            make_delta(delta, bias + k * W, steps, job.softplus)
            skip_rows(y, x, skip + k * W, steps)
            if not job.zoh:
                multiply_rows(x, delta, steps)
            scan_tile(job, delta, x, y, job.b + batch * job.b_b + t0 * job.b_t,
                      job.c + batch * job.c_b + t0 * job.c_t, a2 + k * N * W, ia + k * N * W, h + k * N * W,
                      start, steps)
            if job.z != NULL:
                load_rows(gate, job.z + batch * job.z_b + t0 * job.z_t + first, job.z_t, steps, width)
                gate_rows(y, gate, steps)
            store_rows(job.y + batch * job.y_b + t0 * job.y_t + first, job.y_t, y, steps, width)

    clear_rows(job.y + batch * job.y_b + length * job.y_t + slab_start, job.y_t, job.L - length,
               slab_end - slab_start)
    for k in range(tiles):
        first = slab_start + k * W
        width = min(<Py_ssize_t> W, slab_end - first)
        store_state(job.final + batch * job.final_b + first * job.final_e, job.final_e, h + k * N * W, N, width)


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


# ---- backward -----------------------------------------------------------------------------------

cdef inline void keep_zoh(mf_out after, mf_out scale, mf_out rest, mf_in before, mf_in delta, mf_in u, mf_in a2,
                          mf_in ia, float b) noexcept nogil:
    """`advance_zoh` that keeps the parts of exp(Delta A) and the states."""
    cdef Py_ssize_t j
    cdef float s, p
    for j in range(W):
        mf_exp2_parts(delta[j] * a2[j], &s, &p)
        scale[j] = s
        rest[j] = p
        after[j] = advance(s, p, before[j], u[j], b, ia[j], True)


cdef inline void keep_euler(mf_out after, mf_out scale, mf_out rest, mf_in before, mf_in delta, mf_in x, mf_in a2,
                            float b) noexcept nogil:
    cdef Py_ssize_t j
    cdef float s, p
    for j in range(W):
        mf_exp2_parts(delta[j] * a2[j], &s, &p)
        scale[j] = s
        rest[j] = p
        after[j] = advance(s, p, before[j], x[j], b, 0.0, False)


cdef inline void back_zoh(mf_in delta, mf_in u, mf_in gy, mf_in scale, mf_in rest, mf_in before, mf_in after,
                          mf_in a, mf_in ia, float b, float c, mf_out carry, mf_out da, mf_out ddelta, mf_out du,
                          mf_out lane_b, mf_out lane_c) noexcept nogil:
    """One step of one state, backwards (SPEC 3), with e = exp(z) and g = expm1(z) / A = Delta phi(z).

    dh = gy c + carry;  dC += gy h_t;  dB += dh u g;  du += dh b g
    dDelta += dh e (A h_{t-1} + u b);  dA += dh e h_{t-1} Delta + dh u b Delta^2 phi'(z);  carry = dh e
    """
    cdef Py_ssize_t block, j, i
    cdef float dh, through, ub, dhg, z, near, far, s, p, em1
    for block in range(W // LANES):
        for j in range(LANES):
            i = block * LANES + j
            s = scale[i]
            p = rest[i]
            em1 = s * p + (s - <float> 1.0)
            lane_c[j] += gy[i] * after[i]
            dh = gy[i] * c + carry[i]
            through = s * (p * dh + dh)
            carry[i] = through
            ub = u[i] * b
            ddelta[i] += through * (before[i] * a[i] + ub)
            dhg = dh * (em1 * ia[i])
            du[i] += dhg * b
            lane_b[j] += dhg * u[i]
            z = delta[i] * a[i]
            near = mf_phi_prime_near_zero(z) * (delta[i] * delta[i])
            far = (z * (s * p + s) - em1) * (ia[i] * ia[i])
            da[i] += through * before[i] * delta[i] + dh * ub * (near if mf_abs(z) < SERIES_BELOW else far)


cdef inline void back_euler(mf_in delta, mf_in x, mf_in gy, mf_in scale, mf_in rest, mf_in before, mf_in after,
                            mf_in a, float b, float c, mf_out carry, mf_out da, mf_out ddelta, mf_out dx,
                            mf_out lane_b, mf_out lane_c) noexcept nogil:
    """One step of one state, backwards; x = Delta u and dx its gradient.

    dh = gy c + carry;  dC += gy h_t;  dB += dh x;  dx += dh b
    dDelta += dh e h_{t-1} A (without x's share);  dA += dh e h_{t-1} Delta;  carry = dh e
    """
    cdef Py_ssize_t block, j, i
    cdef float dh, through, kept
    for block in range(W // LANES):
        for j in range(LANES):
            i = block * LANES + j
            lane_c[j] += gy[i] * after[i]
            dh = gy[i] * c + carry[i]
            through = scale[i] * (rest[i] * dh + dh)
            carry[i] = through
            kept = through * before[i]
            ddelta[i] += kept * a[i]
            da[i] += kept * delta[i]
            dx[i] += dh * b
            lane_b[j] += dh * x[i]


cdef inline float sum_lanes(const float *lanes) noexcept nogil:
    """A fixed tree."""
    cdef float[8] half
    cdef Py_ssize_t j
    for j in range(8):
        half[j] = lanes[j] + lanes[j + 8]
    for j in range(4):
        half[j] += half[j + 4]
    return (half[0] + half[2]) + (half[1] + half[3])


cdef inline void gate_backward(mf_out gy, mf_out dz, mf_in dy, mf_in z, Py_ssize_t steps) noexcept nogil:
    """gy = dy silu(z), and dz = dy silu'(z), to be multiplied by y once that is known."""
    cdef Py_ssize_t i
    cdef float s
    for i in range(steps * W):
        s = mf_sigmoid(z[i])
        gy[i] = dy[i] * (z[i] * s)
        dz[i] = dy[i] * (s * (1.0 + z[i] * (1.0 - s)))


cdef inline void skip_backward(mf_out du, mf_out dd, mf_in gy, mf_in u, mf_in skip, Py_ssize_t steps) noexcept nogil:
    cdef Py_ssize_t t, j
    cdef float[W] total
    memset(total, 0, W * sizeof(float))
    for t in range(steps):
        for j in range(W):
            du[t * W + j] = gy[t * W + j] * skip[j]
            total[j] += gy[t * W + j] * u[t * W + j]
    for j in range(W):
        dd[j] += total[j]


cdef inline void product_backward(mf_out du, mf_out ddelta, mf_in dx, mf_in u, mf_in delta,
                                  Py_ssize_t steps) noexcept nogil:
    """x = Delta u (euler)."""
    cdef Py_ssize_t i
    for i in range(steps * W):
        du[i] += dx[i] * delta[i]
        ddelta[i] += dx[i] * u[i]


cdef inline void delta_backward(mf_out ddelta, mf_out dbias, mf_in delta, Py_ssize_t steps,
                                bint softplus) noexcept nogil:
    cdef Py_ssize_t t, j
    cdef float[W] total
    memset(total, 0, W * sizeof(float))
    if softplus:
        for t in range(steps * W):
            ddelta[t] *= -mf_exp2m1(delta[t] * -MF_LOG2E)
    for t in range(steps):
        for j in range(W):
            total[j] += ddelta[t * W + j]
    for j in range(W):
        dbias[j] += total[j]


cdef Py_ssize_t backward_scratch(Py_ssize_t slab, Py_ssize_t N) noexcept nogil:
    return 5 * slab * N + 4 * slab + 12 * T * W + 4 * W + 2 * N * T * LANES


cdef void backward_task(void *context, Py_ssize_t task, int worker) noexcept nogil:
    cdef Job *job = <Job *> context
    cdef Py_ssize_t N = job.N, E = job.E
    cdef Py_ssize_t batch = task // job.n_slabs, slab_index = task % job.n_slabs
    cdef Py_ssize_t slab_start = slab_index * job.slab
    cdef Py_ssize_t slab_end = min(slab_start + job.slab, E)
    cdef Py_ssize_t tiles = (slab_end - slab_start + W - 1) // W
    cdef Py_ssize_t length = job.lengths[batch] if job.lengths != NULL else job.L
    cdef Py_ssize_t chunk, t0, steps, first, width, k, n, t, j
    cdef float b, c
    cdef float *a2 = job.scratch + worker * job.scratch_floats
    cdef float *ia = a2 + job.slab * N
    cdef float *a1 = ia + job.slab * N
    cdef float *carry = a1 + job.slab * N
    cdef float *da = carry + job.slab * N
    cdef float *bias = da + job.slab * N
    cdef float *skip = bias + job.slab
    cdef float *dd = skip + job.slab
    cdef float *dbias = dd + job.slab
    cdef float *delta = dbias + job.slab
    cdef float *u = delta + T * W
    cdef float *x = u + T * W
    cdef float *gy = x + T * W
    cdef float *y = gy + T * W
    cdef float *dz = y + T * W
    cdef float *ddelta = dz + T * W
    cdef float *du = ddelta + T * W
    cdef float *dx = du + T * W
    cdef float *scale = dx + T * W              # exp(Delta A) = scale (1 + rest)
    cdef float *rest = scale + T * W
    cdef float *states = rest + T * W           # states[t] is h after t steps of the chunk
    cdef float *zeros = states + (T + 1) * W
    cdef float *da_chunk = zeros + W
    cdef float *lane_b = da_chunk + W           # [N][T][LANES]
    cdef float *lane_c = lane_b + N * T * LANES
    cdef float *part_b = job.part_db + (slab_index * job.B + batch) * job.L * N
    cdef float *part_c = job.part_dc + (slab_index * job.B + batch) * job.L * N
    cdef const float *kept
    cdef const float *before
    cdef ints start

    memset(zeros, 0, W * sizeof(float))
    memset(da, 0, job.slab * N * sizeof(float))
    memset(dd, 0, job.slab * sizeof(float))
    memset(dbias, 0, job.slab * sizeof(float))
    for k in range(tiles):
        first = slab_start + k * W
        width = min(<Py_ssize_t> W, slab_end - first)
        load_decay(a2 + k * N * W, ia + k * N * W, a1 + k * N * W, job, first, width)
        load_state(carry + k * N * W,
                   offset(job.d_final, batch * job.d_final_b + first * job.d_final_e),
                   job.d_final_e, N, width)
        load_vector(bias + k * W, offset(job.bias, first), width)
        load_vector(skip + k * W, offset(job.d, first), width)
    memset(part_b + length * N, 0, (job.L - length) * N * sizeof(float))
    memset(part_c + length * N, 0, (job.L - length) * N * sizeof(float))
    width = slab_end - slab_start
    clear_rows(job.du + batch * job.du_b + length * job.du_t + slab_start, job.du_t, job.L - length, width)
    clear_rows(job.ddelta + batch * job.ddelta_b + length * job.ddelta_t + slab_start, job.ddelta_t,
               job.L - length, width)
    if job.dz != NULL:
        clear_rows(job.dz + batch * job.dz_b + length * job.dz_t + slab_start, job.dz_t, job.L - length, width)

    for chunk in range((length - 1) // T, -1, -1):
        t0 = chunk * T
        steps = min(<Py_ssize_t> T, length - t0)
        start = restarts(job, batch, t0)
        memset(lane_b, 0, 2 * N * T * LANES * sizeof(float))
        for k in range(tiles):
            first = slab_start + k * W
            width = min(<Py_ssize_t> W, slab_end - first)
            load_rows(delta, job.delta + batch * job.delta_b + t0 * job.delta_t + first, job.delta_t, steps, width)
            load_rows(u, job.u + batch * job.u_b + t0 * job.u_t + first, job.u_t, steps, width)
            make_delta(delta, bias + k * W, steps, job.softplus)
            memcpy(x, u, steps * W * sizeof(float))
            if not job.zoh:
                multiply_rows(x, delta, steps)
            if job.z != NULL:
                load_rows(y, job.dy + batch * job.dy_b + t0 * job.dy_t + first, job.dy_t, steps, width)
                load_rows(rest, job.z + batch * job.z_b + t0 * job.z_t + first, job.z_t, steps, width)
                gate_backward(gy, dz, y, rest, steps)
                skip_rows(y, u, skip + k * W, steps)
            else:
                load_rows(gy, job.dy + batch * job.dy_b + t0 * job.dy_t + first, job.dy_t, steps, width)
            skip_backward(du, dd + k * W, gy, u, skip + k * W, steps)
            memset(ddelta, 0, steps * W * sizeof(float))
            memset(dx, 0, steps * W * sizeof(float))
            kept = job.checkpoints + (batch * job.n_chunks + chunk) * N * E + first
            for n in range(N):
                load_vector(states, kept + n * E, width)
                for t in range(steps):
                    before = zeros if start != NULL and start[t] else states + t * W
                    b = job.b[batch * job.b_b + (t0 + t) * job.b_t + n]
                    if job.zoh:
                        keep_zoh(states + (t + 1) * W, scale + t * W, rest + t * W, before, delta + t * W,
                                 x + t * W, a2 + (k * N + n) * W, ia + (k * N + n) * W, b)
                    else:
                        keep_euler(states + (t + 1) * W, scale + t * W, rest + t * W, before, delta + t * W,
                                   x + t * W, a2 + (k * N + n) * W, b)
                    if job.z != NULL:
                        add_scaled(y + t * W, states + (t + 1) * W, job.c[batch * job.c_b + (t0 + t) * job.c_t + n])
                memset(da_chunk, 0, W * sizeof(float))
                for t in range(steps - 1, -1, -1):
                    before = zeros if start != NULL and start[t] else states + t * W
                    b = job.b[batch * job.b_b + (t0 + t) * job.b_t + n]
                    c = job.c[batch * job.c_b + (t0 + t) * job.c_t + n]
                    if job.zoh:
                        back_zoh(delta + t * W, x + t * W, gy + t * W, scale + t * W, rest + t * W, before,
                                 states + (t + 1) * W, a1 + (k * N + n) * W, ia + (k * N + n) * W, b, c, carry + (k * N + n) * W, da_chunk,
                                 ddelta + t * W, du + t * W, lane_b + (n * T + t) * LANES, lane_c + (n * T + t) * LANES)
                    else:
                        back_euler(delta + t * W, x + t * W, gy + t * W, scale + t * W, rest + t * W, before,
                                   states + (t + 1) * W, a1 + (k * N + n) * W, b, c, carry + (k * N + n) * W, da_chunk,
                                   ddelta + t * W, dx + t * W, lane_b + (n * T + t) * LANES,
                                   lane_c + (n * T + t) * LANES)
                    if start != NULL and start[t]:
                        memset(carry + (k * N + n) * W, 0, W * sizeof(float))
                for j in range(W):
                    da[(k * N + n) * W + j] += da_chunk[j]
            if not job.zoh:
                product_backward(du, ddelta, dx, u, delta, steps)
            delta_backward(ddelta, dbias + k * W, delta, steps, job.softplus)
            store_rows(job.du + batch * job.du_b + t0 * job.du_t + first, job.du_t, du, steps, width)
            store_rows(job.ddelta + batch * job.ddelta_b + t0 * job.ddelta_t + first, job.ddelta_t, ddelta, steps,
                       width)
            if job.dz != NULL:
                multiply_rows(dz, y, steps)
                store_rows(job.dz + batch * job.dz_b + t0 * job.dz_t + first, job.dz_t, dz, steps, width)
        for t in range(steps):
            for n in range(N):
                part_b[(t0 + t) * N + n] = sum_lanes(lane_b + (n * T + t) * LANES)
                part_c[(t0 + t) * N + n] = sum_lanes(lane_c + (n * T + t) * LANES)

    for k in range(tiles):
        first = slab_start + k * W
        width = min(<Py_ssize_t> W, slab_end - first)
        for n in range(N):
            memcpy(job.part_da + (batch * N + n) * E + first, da + (k * N + n) * W, width * sizeof(float))
        memcpy(job.part_dd + batch * E + first, dd + k * W, width * sizeof(float))
        memcpy(job.part_dbias + batch * E + first, dbias + k * W, width * sizeof(float))
        if job.d_initial != NULL:
            store_state(job.d_initial + batch * job.d_initial_b + first * job.d_initial_e, job.d_initial_e,
                        carry + k * N * W, N, width)


cdef void sum_slabs_task(void *context, Py_ssize_t task, int worker) noexcept nogil:
    """dB and dC of 64 rows: the slabs' shares in order of slab."""
    cdef Job *job = <Job *> context
    cdef Py_ssize_t N = job.N, rows = job.B * job.L
    cdef Py_ssize_t row, n, s, batch, t
    cdef float sum_b, sum_c
    for row in range(task * 64, min(rows, task * 64 + 64)):
        batch = row // job.L
        t = row % job.L
        for n in range(N):
            sum_b = 0
            sum_c = 0
            for s in range(job.n_slabs):
                sum_b += job.part_db[(s * rows + row) * N + n]
                sum_c += job.part_dc[(s * rows + row) * N + n]
            job.db[batch * job.db_b + t * job.db_t + n] = sum_b
            job.dc[batch * job.dc_b + t * job.dc_t + n] = sum_c


# ---- step ---------------------------------------------------------------------------------------

cdef struct StepJob:
    Py_ssize_t E, N, blocks
    bint softplus, zoh
    const float *u
    Py_ssize_t u_b
    const float *delta
    Py_ssize_t delta_b
    const float *b
    Py_ssize_t b_b
    const float *c
    Py_ssize_t c_b
    const float *z
    Py_ssize_t z_b
    const float *a
    Py_ssize_t a_e
    const float *d
    const float *bias
    float *state
    Py_ssize_t state_b, state_e
    float *y
    Py_ssize_t y_b

cdef enum:
    STEP_LANES = 8
    STEP_BLOCK = 128    # channels in a task


cdef void step_task(void *context, Py_ssize_t task, int worker) noexcept nogil:
    """One step of STEP_BLOCK channels of one row. The state is (E, N) with N contiguous, so here the
    lanes run over n, with lane sums added in a fixed order."""
    cdef StepJob *job = <StepJob *> context
    cdef Py_ssize_t batch = task // job.blocks, first = (task % job.blocks) * STEP_BLOCK
    cdef Py_ssize_t e, n, j, N = job.N, whole = N - N % STEP_LANES
    cdef const float *b = job.b + batch * job.b_b
    cdef const float *c = job.c + batch * job.c_b
    cdef const float *a
    cdef float *h
    cdef float[STEP_LANES] lanes
    cdef float delta, u, y, z
    for e in range(first, min(job.E, first + STEP_BLOCK)):
        a = job.a + e * job.a_e
        h = job.state + batch * job.state_b + e * job.state_e
        u = job.u[batch * job.u_b + e]
        delta = job.delta[batch * job.delta_b + e]
        if job.bias != NULL:
            delta += job.bias[e]
        if job.softplus:
            delta = mf_softplus(delta)
        memset(lanes, 0, STEP_LANES * sizeof(float))
        n = 0
        while n < whole:
            step_lanes(a + n, b + n, c + n, h + n, lanes, delta, u, job.zoh)
            n += STEP_LANES
        y = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]))
        for n in range(whole, N):
            h[n] = step_state(a[n], b[n], h[n], delta, u, job.zoh)
            y += h[n] * c[n]
        if job.d != NULL:
            y += job.d[e] * u
        if job.z != NULL:
            z = job.z[batch * job.z_b + e]
            y *= z * mf_sigmoid(z)
        job.y[batch * job.y_b + e] = y


cdef inline float step_state(float a, float b, float h, float delta, float u, bint zoh) noexcept nogil:
    cdef float s, p
    if mf_abs(a) < SMALLEST_A:
        a = SMALLEST_A if a > 0 else -SMALLEST_A
    mf_exp2_parts(delta * (a * MF_LOG2E), &s, &p)
    return advance(s, p, h, u if zoh else delta * u, b, <float> 1.0 / a, zoh)


cdef inline void step_lanes(mf_in a, mf_in b, mf_in c, mf_out h, mf_out lanes, float delta, float u,
                            bint zoh) noexcept nogil:
    cdef Py_ssize_t j
    if zoh:
        for j in range(STEP_LANES):
            h[j] = step_state(a[j], b[j], h[j], delta, u, True)
            lanes[j] += h[j] * c[j]
    else:
        for j in range(STEP_LANES):
            h[j] = step_state(a[j], b[j], h[j], delta, u, False)
            lanes[j] += h[j] * c[j]


# ---- entry points -------------------------------------------------------------------------------

def checkpoint_shape(Py_ssize_t B, Py_ssize_t L, Py_ssize_t E, Py_ssize_t N):
    """Shape of the float32 array of kept states that `forward` fills and `backward` reads."""
    return (B, (L + T - 1) // T, N, E)


cdef float *aligned(float *p) noexcept nogil:
    return <float *> ((<uintptr_t> p + 63) & ~(<uintptr_t> 63))


cdef void choose_slab(Job *job) noexcept nogil:
    """Wide slabs share their loads of b and c and their lane sums; narrow ones make enough tasks when
    the batch is small. Depends on the shape alone."""
    cdef Py_ssize_t slab = WIDE_SLAB
    while slab > W and job.B * ((job.E + slab - 1) // slab) < 16:
        slab //= 2
    job.slab = slab
    job.n_slabs = (job.E + slab - 1) // slab
    job.n_chunks = (job.L + T - 1) // T


cdef int thread_count(Job *job, int threads) noexcept nogil:
    return 1 if job.B * job.L * job.E * job.N < SERIAL_BELOW else threads


cdef void set_inputs(Job *job, const float[:, :, :] u, const float[:, :, :] delta, const float[:, :] a,
                     const float[:, :, :] b, const float[:, :, :] c, const float[:] d, const float[:, :, :] z,
                     const float[:] delta_bias, const int[:, :] seq_start, const int[:] lengths,
                     bint delta_softplus, bint zoh) noexcept:
    memset(job, 0, sizeof(Job))
    job.B = u.shape[0]
    job.L = u.shape[1]
    job.E = u.shape[2]
    job.N = a.shape[1]
    job.softplus = delta_softplus
    job.zoh = zoh
    job.u = &u[0, 0, 0]
    job.u_b = u.strides[0] // 4
    job.u_t = u.strides[1] // 4
    job.delta = &delta[0, 0, 0]
    job.delta_b = delta.strides[0] // 4
    job.delta_t = delta.strides[1] // 4
    job.a = &a[0, 0]
    job.a_e = a.strides[0] // 4
    job.b = &b[0, 0, 0]
    job.b_b = b.strides[0] // 4
    job.b_t = b.strides[1] // 4
    job.c = &c[0, 0, 0]
    job.c_b = c.strides[0] // 4
    job.c_t = c.strides[1] // 4
    if d is not None:
        job.d = &d[0]
    if z is not None:
        job.z = &z[0, 0, 0]
        job.z_b = z.strides[0] // 4
        job.z_t = z.strides[1] // 4
    if delta_bias is not None:
        job.bias = &delta_bias[0]
    if seq_start is not None:
        job.seq_start = &seq_start[0, 0]
        job.seq_b = seq_start.strides[0] // 4
    if lengths is not None:
        job.lengths = &lengths[0]


def forward(const float[:, :, :] u, const float[:, :, :] delta, const float[:, :] a, const float[:, :, :] b,
            const float[:, :, :] c, const float[:] d, const float[:, :, :] z, const float[:] delta_bias,
            const float[:, :, :] initial_state, const int[:, :] seq_start, const int[:] lengths,
            float[:, :, :] y, float[:, :, :] final_state, float[:, :, :, :] checkpoints,
            bint delta_softplus, bint zoh, int threads):
    """`Backend.selective_scan`. Writes y (B, L, E), final_state (B, E, N) and, unless None, checkpoints.

    All arrays have a contiguous last axis and no extent of 0 (the caller checks); d, z, delta_bias,
    initial_state, seq_start, lengths and checkpoints may be None.
    """
    cdef Job job
    cdef void *block
    set_inputs(&job, u, delta, a, b, c, d, z, delta_bias, seq_start, lengths, delta_softplus, zoh)
    choose_slab(&job)
    if initial_state is not None:
        job.initial = &initial_state[0, 0, 0]
        job.initial_b = initial_state.strides[0] // 4
        job.initial_e = initial_state.strides[1] // 4
    job.y = &y[0, 0, 0]
    job.y_b = y.strides[0] // 4
    job.y_t = y.strides[1] // 4
    job.final = &final_state[0, 0, 0]
    job.final_b = final_state.strides[0] // 4
    job.final_e = final_state.strides[1] // 4
    if checkpoints is not None:
        job.checkpoints = &checkpoints[0, 0, 0, 0]
    threads = thread_count(&job, threads)
    job.scratch_floats = (forward_scratch(job.slab, job.N) + 31) // 16 * 16
    block = malloc((threads * job.scratch_floats + 16) * sizeof(float))
    if block == NULL:
        raise MemoryError("selective_scan: no memory for scratch")
    job.scratch = aligned(<float *> block)
    with nogil:
        parallel_for(forward_task, &job, job.B * job.n_slabs, threads)
    free(block)


def backward(const float[:, :, :] dy, const float[:, :, :] d_final_state, const float[:, :, :] u,
             const float[:, :, :] delta, const float[:, :] a, const float[:, :, :] b, const float[:, :, :] c,
             const float[:] d, const float[:, :, :] z, const float[:] delta_bias, const int[:, :] seq_start,
             const int[:] lengths, const float[:, :, :, :] checkpoints, float[:, :, :] du, float[:, :, :] ddelta,
             float[:, :, :] db, float[:, :, :] dc, float[:, :, :] dz, float[:, :] d_a, float[:] d_d,
             float[:] d_delta_bias, float[:, :, :] d_initial_state, bint delta_softplus, bint zoh, int threads):
    """`Backend.selective_scan_backward`. Writes du, ddelta, db, dc, dz (None without z) and
    d_initial_state (unless None); ADDS to d_a, d_d and d_delta_bias (each unless None)."""
    cdef Job job
    cdef void *block
    cdef float *p
    cdef Py_ssize_t rows, e, n, batch
    cdef double total
    set_inputs(&job, u, delta, a, b, c, d, z, delta_bias, seq_start, lengths, delta_softplus, zoh)
    choose_slab(&job)
    job.checkpoints = <float *> &checkpoints[0, 0, 0, 0]
    job.dy = &dy[0, 0, 0]
    job.dy_b = dy.strides[0] // 4
    job.dy_t = dy.strides[1] // 4
    if d_final_state is not None:
        job.d_final = &d_final_state[0, 0, 0]
        job.d_final_b = d_final_state.strides[0] // 4
        job.d_final_e = d_final_state.strides[1] // 4
    job.du = &du[0, 0, 0]
    job.du_b = du.strides[0] // 4
    job.du_t = du.strides[1] // 4
    job.ddelta = &ddelta[0, 0, 0]
    job.ddelta_b = ddelta.strides[0] // 4
    job.ddelta_t = ddelta.strides[1] // 4
    job.db = &db[0, 0, 0]
    job.db_b = db.strides[0] // 4
    job.db_t = db.strides[1] // 4
    job.dc = &dc[0, 0, 0]
    job.dc_b = dc.strides[0] // 4
    job.dc_t = dc.strides[1] // 4
    if dz is not None:
        job.dz = &dz[0, 0, 0]
        job.dz_b = dz.strides[0] // 4
        job.dz_t = dz.strides[1] // 4
    if d_initial_state is not None:
        job.d_initial = &d_initial_state[0, 0, 0]
        job.d_initial_b = d_initial_state.strides[0] // 4
        job.d_initial_e = d_initial_state.strides[1] // 4
    threads = thread_count(&job, threads)
    job.scratch_floats = (backward_scratch(job.slab, job.N) + 31) // 16 * 16
    rows = job.B * job.L
    block = malloc((16 + threads * job.scratch_floats + 2 * job.n_slabs * rows * job.N
                    + job.B * job.E * (job.N + 2)) * sizeof(float))
    if block == NULL:
        raise MemoryError("selective_scan_backward: no memory for scratch and partial sums")
    job.scratch = aligned(<float *> block)
    p = job.scratch + threads * job.scratch_floats
    job.part_db = p
    job.part_dc = p + job.n_slabs * rows * job.N
    job.part_da = job.part_dc + job.n_slabs * rows * job.N
    job.part_dd = job.part_da + job.B * job.N * job.E
    job.part_dbias = job.part_dd + job.B * job.E
    with nogil:
        parallel_for(backward_task, &job, job.B * job.n_slabs, threads)
        parallel_for(sum_slabs_task, &job, (rows + 63) // 64, threads)
        if d_a is not None:
            for e in range(job.E):
                for n in range(job.N):
                    total = 0
                    for batch in range(job.B):
                        total += job.part_da[(batch * job.N + n) * job.E + e]
                    d_a[e, n] += <float> total
        if d_d is not None:
            for e in range(job.E):
                total = 0
                for batch in range(job.B):
                    total += job.part_dd[batch * job.E + e]
                d_d[e] += <float> total
        if d_delta_bias is not None:
            for e in range(job.E):
                total = 0
                for batch in range(job.B):
                    total += job.part_dbias[batch * job.E + e]
                d_delta_bias[e] += <float> total
    free(block)


def step(const float[:, :] u, const float[:, :] delta, const float[:, :] a, const float[:, :] b,
         const float[:, :] c, const float[:] d, const float[:, :] z, const float[:] delta_bias,
         float[:, :, :] state, float[:, :] y, bint delta_softplus, bint zoh, int threads):
    """`Backend.selective_scan_step`: u, delta, z, y (B, E), b, c (B, N); updates state (B, E, N), writes y."""
    cdef StepJob job
    memset(&job, 0, sizeof(StepJob))
    job.E = u.shape[1]
    job.N = a.shape[1]
    job.blocks = (job.E + STEP_BLOCK - 1) // STEP_BLOCK
    job.softplus = delta_softplus
    job.zoh = zoh
    job.u = &u[0, 0]
    job.u_b = u.strides[0] // 4
    job.delta = &delta[0, 0]
    job.delta_b = delta.strides[0] // 4
    job.a = &a[0, 0]
    job.a_e = a.strides[0] // 4
    job.b = &b[0, 0]
    job.b_b = b.strides[0] // 4
    job.c = &c[0, 0]
    job.c_b = c.strides[0] // 4
    if d is not None:
        job.d = &d[0]
    if z is not None:
        job.z = &z[0, 0]
        job.z_b = z.strides[0] // 4
    if delta_bias is not None:
        job.bias = &delta_bias[0]
    job.state = &state[0, 0, 0]
    job.state_b = state.strides[0] // 4
    job.state_e = state.strides[1] // 4
    job.y = &y[0, 0]
    job.y_b = y.strides[0] // 4
    if u.shape[0] * job.E * job.N < SERIAL_BELOW:
        threads = 1
    with nogil:
        parallel_for(step_task, &job, u.shape[0] * job.blocks, threads)
