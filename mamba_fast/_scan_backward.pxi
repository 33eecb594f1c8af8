# The scan backward: inner loops, one task, and the sums over tasks; included by _scan.pyx.

cdef inline void keep_pair(Py_ssize_t steps, mf_in delta, mf_in x, mf_out y, mf_in b, mf_in c, Py_ssize_t stride,
                           const float *a2, const float *ia, mf_out states, mf_out parts, bint zoh) noexcept nogil:
    """`scan_pair` from states[0] that keeps the states after each step, and exp(Delta A) = s (1 + p)."""
    cdef Py_ssize_t t, j
    cdef float b0, b1, c0, c1, d, s, p
    cdef float[LANES] h0
    cdef float[LANES] h1
    cdef float[LANES] a0
    cdef float[LANES] a1
    cdef float[LANES] i0
    cdef float[LANES] i1
    for j in range(LANES):
        h0[j] = states[j]
        h1[j] = states[LANES + j]
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
            parts[(4 * t) * LANES + j] = s
            parts[(4 * t + 1) * LANES + j] = p
            states[(2 * t + 2) * LANES + j] = h0[j]
            mf_exp2_parts(d * a1[j], &s, &p)
            h1[j] = advance(s, p, h1[j], x[t * W + j], b1, i1[j], zoh)
            parts[(4 * t + 2) * LANES + j] = s
            parts[(4 * t + 3) * LANES + j] = p
            states[(2 * t + 3) * LANES + j] = h1[j]
            y[t * W + j] += h0[j] * c0 + h1[j] * c1


# One step of one state and channel, backwards (SPEC 3). With e = exp(z) = s (1 + p), z = Delta A:
#
#   dh = gy c + carry;  dC += gy h_t;  carry = dh e
#
# zoh, with g = expm1(z) / A = Delta phi(z):
#   dB += dh u g;  du += dh b g
#   dDelta += dh e (A h_{t-1} + u b);  dA += dh e h_{t-1} Delta + dh u b Delta^2 phi'(z)
# euler, with x = Delta u, whose gradient goes on to Delta and u afterwards:
#   dB += dh x;  dx += dh b;  dDelta += dh e h_{t-1} A;  dA += dh e h_{t-1} Delta

cdef inline void back_zoh(float d, float u, float gy, float s, float p, float before, float after, float a,
                          float ia, float b, float c, float *carry, float *da, float *ddelta, float *du,
                          float *lane_b, float *lane_c) noexcept nogil:
    cdef float em1 = s * p + (s - <float> 1.0)
    cdef float dh = gy * c + carry[0]
    cdef float through = s * (p * dh + dh)
    cdef float ub = u * b
    cdef float dhg = dh * (em1 * ia)
    cdef float z = d * a
    cdef float near = mf_phi_prime_near_zero(z) * (d * d)
    cdef float far = (z * (s * p + s) - em1) * (ia * ia)
    lane_c[0] += gy * after
    lane_b[0] += dhg * u
    carry[0] = through
    ddelta[0] += through * (before * a + ub)
    du[0] += dhg * b
    da[0] += through * before * d + dh * ub * (near if mf_abs(z) < SERIES_BELOW else far)


cdef inline void back_euler(float d, float x, float gy, float s, float p, float before, float after, float a,
                            float b, float c, float *carry, float *da, float *ddelta, float *dx, float *lane_b,
                            float *lane_c) noexcept nogil:
    cdef float dh = gy * c + carry[0]
    cdef float through = s * (p * dh + dh)
    cdef float kept = through * before
    lane_c[0] += gy * after
    lane_b[0] += dh * x
    carry[0] = through
    ddelta[0] += kept * a
    da[0] += kept * d
    dx[0] += dh * b


cdef inline void back_pair(Py_ssize_t steps, mf_in delta, mf_in x, mf_in gy, mf_in b, mf_in c, Py_ssize_t stride,
                           const float *a, const float *ia, mf_in states, mf_in parts, float *carry, float *da,
                           mf_out ddelta, mf_out dx, mf_out lane_b, mf_out lane_c, bint zoh) noexcept nogil:
    """Two states of LANES channels, from the last step to the first."""
    cdef Py_ssize_t t, j
    cdef float b0, b1, c0, c1, d, u, g, to_delta, to_x
    cdef float[LANES] carry0
    cdef float[LANES] carry1
    cdef float[LANES] da0
    cdef float[LANES] da1
    cdef float[LANES] a0
    cdef float[LANES] a1
    cdef float[LANES] i0
    cdef float[LANES] i1
    for j in range(LANES):
        carry0[j] = carry[j]
        carry1[j] = carry[W + j]
        da0[j] = 0
        da1[j] = 0
        a0[j] = a[j]
        a1[j] = a[W + j]
        i0[j] = ia[j]
        i1[j] = ia[W + j]
    for t in range(steps - 1, -1, -1):
        b0 = b[t * stride]
        b1 = b[t * stride + 1]
        c0 = c[t * stride]
        c1 = c[t * stride + 1]
        for j in range(LANES):
            d = delta[t * W + j]
            u = x[t * W + j]
            g = gy[t * W + j]
            to_delta = ddelta[t * W + j]
            to_x = dx[t * W + j]
            if zoh:
                back_zoh(d, u, g, parts[4 * t * LANES + j], parts[(4 * t + 1) * LANES + j],
                         states[2 * t * LANES + j], states[(2 * t + 2) * LANES + j], a0[j], i0[j], b0, c0,
                         &carry0[j], &da0[j], &to_delta, &to_x, &lane_b[t * LANES + j], &lane_c[t * LANES + j])
                back_zoh(d, u, g, parts[(4 * t + 2) * LANES + j], parts[(4 * t + 3) * LANES + j],
                         states[(2 * t + 1) * LANES + j], states[(2 * t + 3) * LANES + j], a1[j], i1[j], b1, c1,
                         &carry1[j], &da1[j], &to_delta, &to_x, &lane_b[(T + t) * LANES + j],
                         &lane_c[(T + t) * LANES + j])
            else:
                back_euler(d, u, g, parts[4 * t * LANES + j], parts[(4 * t + 1) * LANES + j],
                           states[2 * t * LANES + j], states[(2 * t + 2) * LANES + j], a0[j], b0, c0, &carry0[j],
                           &da0[j], &to_delta, &to_x, &lane_b[t * LANES + j], &lane_c[t * LANES + j])
                back_euler(d, u, g, parts[(4 * t + 2) * LANES + j], parts[(4 * t + 3) * LANES + j],
                           states[(2 * t + 1) * LANES + j], states[(2 * t + 3) * LANES + j], a1[j], b1, c1,
                           &carry1[j], &da1[j], &to_delta, &to_x, &lane_b[(T + t) * LANES + j],
                           &lane_c[(T + t) * LANES + j])
            ddelta[t * W + j] = to_delta
            dx[t * W + j] = to_x
    for j in range(LANES):
        carry[j] = carry0[j]
        carry[W + j] = carry1[j]
        da[j] += da0[j]
        da[W + j] += da1[j]


cdef void keep_pair_zoh(Py_ssize_t steps, mf_in delta, mf_in x, mf_out y, mf_in b, mf_in c, Py_ssize_t stride,
                        const float *a2, const float *ia, mf_out states, mf_out parts) noexcept nogil:
    keep_pair(steps, delta, x, y, b, c, stride, a2, ia, states, parts, True)


cdef void keep_pair_euler(Py_ssize_t steps, mf_in delta, mf_in x, mf_out y, mf_in b, mf_in c, Py_ssize_t stride,
                          const float *a2, const float *ia, mf_out states, mf_out parts) noexcept nogil:
    keep_pair(steps, delta, x, y, b, c, stride, a2, ia, states, parts, False)


cdef void back_pair_zoh(Py_ssize_t steps, mf_in delta, mf_in x, mf_in gy, mf_in b, mf_in c, Py_ssize_t stride,
                        const float *a, const float *ia, mf_in states, mf_in parts, float *carry, float *da,
                        mf_out ddelta, mf_out dx, mf_out lane_b, mf_out lane_c) noexcept nogil:
    back_pair(steps, delta, x, gy, b, c, stride, a, ia, states, parts, carry, da, ddelta, dx, lane_b, lane_c, True)


cdef void back_pair_euler(Py_ssize_t steps, mf_in delta, mf_in x, mf_in gy, mf_in b, mf_in c, Py_ssize_t stride,
                          const float *a, const float *ia, mf_in states, mf_in parts, float *carry, float *da,
                          mf_out ddelta, mf_out dx, mf_out lane_b, mf_out lane_c) noexcept nogil:
    back_pair(steps, delta, x, gy, b, c, stride, a, ia, states, parts, carry, da, ddelta, dx, lane_b, lane_c, False)


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


cdef struct Chunk:
    # where the chunk is, and its tile's scratch: [T][W] each but for the last ones
    Py_ssize_t batch, t0, steps
    Segments segments
    float *delta
    float *u
    float *x                # u, or Delta u for euler
    float *gy               # gradient of y before the gate
    float *y                # y before the gate, recomputed where there is one
    float *dz
    float *ddelta
    float *du
    float *dx               # gradient of Delta u (euler)
    float *parts            # [T][4][LANES]: s, p of exp(Delta A) = s (1 + p) for two states
    float *states           # [T + 1][2][LANES]: two states after 0 to T steps
    float *b                # [T][2 * pairs]
    float *c
    float *lane_b           # [2 * pairs][T][LANES]: sums over channels, in lanes
    float *lane_c


cdef Py_ssize_t backward_scratch(Py_ssize_t slab, Py_ssize_t pairs) noexcept nogil:
    return (10 * slab * pairs + 6 * slab + 9 * T * W + (6 * T + 2) * LANES + 4 * T * pairs + 4 * pairs * T * LANES
            + 20 * STAGGER)


cdef void lay_out(Chunk *k, float *scratch, Py_ssize_t pairs) noexcept nogil:
    k.delta = scratch + STAGGER
    k.u = k.delta + T * W + STAGGER
    k.x = k.u + T * W + STAGGER
    k.gy = k.x + T * W + STAGGER
    k.y = k.gy + T * W + STAGGER
    k.dz = k.y + T * W + STAGGER
    k.ddelta = k.dz + T * W + STAGGER
    k.du = k.ddelta + T * W + STAGGER
    k.dx = k.du + T * W + STAGGER
    k.parts = k.dx + T * W + STAGGER
    k.states = k.parts + 4 * T * LANES + STAGGER
    k.b = k.states + (2 * T + 2) * LANES + STAGGER
    k.c = k.b + 2 * T * pairs
    k.lane_b = aligned(k.c + 2 * T * pairs)
    k.lane_c = k.lane_b + 2 * pairs * T * LANES + STAGGER


cdef void begin_tile(const Job *job, Chunk *k, Py_ssize_t first, Py_ssize_t width, const float *bias,
                     const float *skip, const float *low, const float *high, float *dd) noexcept nogil:
    """Load a tile's inputs for a chunk, take dy back through the gate and the D skip, clear the sums."""
    cdef Py_ssize_t rows = k.steps
    load_rows(k.delta, job.delta + k.batch * job.delta_b + k.t0 * job.delta_t + first, job.delta_t, rows, width)
    load_rows(k.u, job.u + k.batch * job.u_b + k.t0 * job.u_t + first, job.u_t, rows, width)
    make_delta(k.delta, bias, low, high, rows, job.softplus)
    memcpy(k.x, k.u, rows * W * sizeof(float))
    if not job.zoh:
        multiply_rows(k.x, k.delta, rows)
    if job.z != NULL:
        load_rows(k.y, job.dy + k.batch * job.dy_b + k.t0 * job.dy_t + first, job.dy_t, rows, width)
        load_rows(k.dx, job.z + k.batch * job.z_b + k.t0 * job.z_t + first, job.z_t, rows, width)
        gate_backward(k.gy, k.dz, k.y, k.dx, rows)
        skip_rows(k.y, k.u, skip, rows)
    else:
        load_rows(k.gy, job.dy + k.batch * job.dy_b + k.t0 * job.dy_t + first, job.dy_t, rows, width)
    skip_backward(k.du, dd, k.gy, k.u, skip, rows)
    memset(k.ddelta, 0, rows * W * sizeof(float))
    memset(k.dx, 0, rows * W * sizeof(float))


cdef void back_tile(const Job *job, Chunk *k, const float *kept, Py_ssize_t width, const float *a2, const float *ia,
                    const float *a, float *carry, float *da) noexcept nogil:
    """All states of a tile over one chunk: recompute from the kept ones, then walk back. `kept` is (N, E)."""
    cdef Py_ssize_t i, t, n, pair, block, lane, steps, q, stride = 2 * job.pairs
    cdef float *dx = k.du if job.zoh else k.dx
    for i in range(k.segments.count - 1, -1, -1):
        t = k.segments.at[i]
        steps = k.segments.at[i + 1] - t
        for pair in range(job.pairs):
            n = 2 * pair
            for block in range(W // LANES):
                lane = block * LANES
                memset(k.states, 0, 2 * LANES * sizeof(float))
                if not k.segments.fresh[i] and lane < width:
                    for q in range(min(<Py_ssize_t> 2, job.N - n)):
                        memcpy(k.states + q * LANES, kept + (n + q) * job.E + lane,
                               min(<Py_ssize_t> LANES, width - lane) * sizeof(float))
                job.keep_pair(steps, k.delta + t * W + lane, k.x + t * W + lane, k.y + t * W + lane,
                              k.b + t * stride + n, k.c + t * stride + n, stride, a2 + n * W + lane,
                              ia + n * W + lane, k.states, k.parts)
                job.back_pair(steps, k.delta + t * W + lane, k.x + t * W + lane, k.gy + t * W + lane,
                              k.b + t * stride + n, k.c + t * stride + n, stride, a + n * W + lane,
                              ia + n * W + lane, k.states, k.parts, carry + n * W + lane, da + n * W + lane,
                              k.ddelta + t * W + lane, dx + t * W + lane, k.lane_b + (n * T + t) * LANES,
                              k.lane_c + (n * T + t) * LANES)
        if k.segments.fresh[i]:
            memset(carry, 0, stride * W * sizeof(float))


cdef void end_tile(const Job *job, Chunk *k, Py_ssize_t first, Py_ssize_t width, float *dbias) noexcept nogil:
    """Finish and store the gradients of a tile's inputs."""
    if not job.zoh:
        product_backward(k.du, k.ddelta, k.dx, k.u, k.delta, k.steps)
    delta_backward(k.ddelta, dbias, k.delta, k.steps, job.softplus)
    store_rows(job.du + k.batch * job.du_b + k.t0 * job.du_t + first, job.du_t, k.du, k.steps, width)
    store_rows(job.ddelta + k.batch * job.ddelta_b + k.t0 * job.ddelta_t + first, job.ddelta_t, k.ddelta, k.steps,
               width)
    if job.dz != NULL:
        multiply_rows(k.dz, k.y, k.steps)
        store_rows(job.dz + k.batch * job.dz_b + k.t0 * job.dz_t + first, job.dz_t, k.dz, k.steps, width)


cdef void clear_beyond(const Job *job, Py_ssize_t batch, Py_ssize_t length, Py_ssize_t first, Py_ssize_t width,
                       float *part_b, float *part_c) noexcept nogil:
    """Zero gradients at the positions at or beyond a row's length."""
    cdef Py_ssize_t rest = job.L - length
    memset(part_b + length * job.N, 0, rest * job.N * sizeof(float))
    memset(part_c + length * job.N, 0, rest * job.N * sizeof(float))
    clear_rows(job.du + batch * job.du_b + length * job.du_t + first, job.du_t, rest, width)
    clear_rows(job.ddelta + batch * job.ddelta_b + length * job.ddelta_t + first, job.ddelta_t, rest, width)
    if job.dz != NULL:
        clear_rows(job.dz + batch * job.dz_b + length * job.dz_t + first, job.dz_t, rest, width)


cdef void backward_task(void *context, Py_ssize_t task, int worker) noexcept nogil:
    cdef Job *job = <Job *> context
    cdef Py_ssize_t N = job.N, E = job.E, states = 2 * job.pairs
    cdef Py_ssize_t batch = task // job.n_slabs, slab_index = task % job.n_slabs
    cdef Py_ssize_t slab_start = slab_index * job.slab
    cdef Py_ssize_t slab_end = min(slab_start + job.slab, E)
    cdef Py_ssize_t tiles = (slab_end - slab_start + W - 1) // W
    cdef Py_ssize_t length = job.lengths[batch] if job.lengths != NULL else job.L
    cdef Py_ssize_t chunk, first, width, i, n, t, at
    cdef float *a2 = job.scratch + worker * job.scratch_floats     # [tiles][states][W] each
    cdef float *ia = a2 + job.slab * states + STAGGER
    cdef float *a = ia + job.slab * states + STAGGER
    cdef float *carry = a + job.slab * states + STAGGER
    cdef float *da = carry + job.slab * states + STAGGER
    cdef float *bias = da + job.slab * states + STAGGER             # [tiles][W] each
    cdef float *skip = bias + job.slab
    cdef float *low = skip + job.slab
    cdef float *high = low + job.slab
    cdef float *dd = high + job.slab
    cdef float *dbias = dd + job.slab
    cdef float *part_b = job.part_db + (slab_index * job.B + batch) * job.L * N
    cdef float *part_c = job.part_dc + (slab_index * job.B + batch) * job.L * N
    cdef Chunk k

    lay_out(&k, dbias + job.slab, job.pairs)
    k.batch = batch
    memset(da, 0, job.slab * states * sizeof(float))
    memset(dd, 0, job.slab * sizeof(float))
    memset(dbias, 0, job.slab * sizeof(float))
    for i in range(tiles):
        first = slab_start + i * W
        width = min(<Py_ssize_t> W, slab_end - first)
        at = i * states * W
        load_decay(a2 + at, ia + at, a + at, low + i * W, high + i * W, job, first, width)
        load_state(carry + at, offset(job.d_final, batch * job.d_final_b + first * job.d_final_e), job.d_final_e,
                   job, width)
        load_vector(bias + i * W, offset(job.bias, first), width)
        load_vector(skip + i * W, offset(job.d, first), width)
    clear_beyond(job, batch, length, slab_start, slab_end - slab_start, part_b, part_c)

    for chunk in range((length - 1) // T, -1, -1):
        k.t0 = chunk * T
        k.steps = min(<Py_ssize_t> T, length - k.t0)
        find_segments(&k.segments, job, batch, k.t0, k.steps)
        load_weights(k.b, job.b + batch * job.b_b + k.t0 * job.b_t, job.b_t, k.steps, N, job.pairs)
        load_weights(k.c, job.c + batch * job.c_b + k.t0 * job.c_t, job.c_t, k.steps, N, job.pairs)
        memset(k.lane_b, 0, states * T * LANES * sizeof(float))
        memset(k.lane_c, 0, states * T * LANES * sizeof(float))
        for i in range(tiles):
            first = slab_start + i * W
            width = min(<Py_ssize_t> W, slab_end - first)
            at = i * states * W
            begin_tile(job, &k, first, width, bias + i * W, skip + i * W, low + i * W, high + i * W, dd + i * W)
            back_tile(job, &k, job.checkpoints + (batch * job.n_chunks + chunk) * N * E + first, width, a2 + at,
                      ia + at, a + at, carry + at, da + at)
            end_tile(job, &k, first, width, dbias + i * W)
        for t in range(k.steps):
            for n in range(N):
                part_b[(k.t0 + t) * N + n] = sum_lanes(k.lane_b + (n * T + t) * LANES)
                part_c[(k.t0 + t) * N + n] = sum_lanes(k.lane_c + (n * T + t) * LANES)

    for i in range(tiles):
        first = slab_start + i * W
        width = min(<Py_ssize_t> W, slab_end - first)
        for n in range(N):
            memcpy(job.part_da + (batch * N + n) * E + first, da + (i * states + n) * W, width * sizeof(float))
        memcpy(job.part_dd + batch * E + first, dd + i * W, width * sizeof(float))
        memcpy(job.part_dbias + batch * E + first, dbias + i * W, width * sizeof(float))
        if job.d_initial != NULL:
            store_state(job.d_initial + batch * job.d_initial_b + first * job.d_initial_e, job.d_initial_e,
                        carry + i * states * W, N, width)


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


cdef inline float sum_rows(const float *part, Py_ssize_t stride, Py_ssize_t B) noexcept nogil:
    cdef Py_ssize_t batch
    cdef double total = 0
    for batch in range(B):
        total += part[batch * stride]
    return <float> total


cdef void sum_rows_task(void *context, Py_ssize_t task, int worker) noexcept nogil:
    """dA, dD and the bias's gradient of W channels: the rows' shares in order of row."""
    cdef Job *job = <Job *> context
    cdef Py_ssize_t N = job.N, E = job.E, B = job.B, e, n
    for e in range(task * W, min(E, task * W + W)):
        if job.d_a != NULL:
            for n in range(N):
                job.d_a[e * job.d_a_e + n] += sum_rows(job.part_da + n * E + e, N * E, B)
        if job.d_d != NULL:
            job.d_d[e] += sum_rows(job.part_dd + e, E, B)
        if job.d_bias != NULL:
            job.d_bias[e] += sum_rows(job.part_dbias + e, E, B)
