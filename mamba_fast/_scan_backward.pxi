# The scan backward: inner loops, one task, and the sums over tasks; included by _scan.pyx.

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


cdef struct Chunk:
    # where the chunk is, and its tile's scratch: [T][W] each but for the last ones
    Py_ssize_t batch, t0, steps
    ints start
    float *delta
    float *u
    float *x                # u, or Delta u for euler
    float *gy               # gradient of y before the gate
    float *y                # y before the gate, recomputed where there is one
    float *dz
    float *ddelta
    float *du
    float *dx               # gradient of Delta u (euler)
    float *scale            # exp(Delta A) = scale (1 + rest), of one state n
    float *rest
    float *states           # [T + 1][W]: one state n after 0 to T steps
    float *zeros            # [W]
    float *da               # [W]
    float *lane_b           # [N][T][LANES]: sums over channels, in lanes
    float *lane_c


cdef Py_ssize_t backward_scratch(Py_ssize_t slab, Py_ssize_t N) noexcept nogil:
    return 5 * slab * N + 4 * slab + 12 * T * W + 3 * W + 2 * N * T * LANES


cdef void lay_out(Chunk *k, float *scratch, Py_ssize_t N) noexcept nogil:
    k.delta = scratch
    k.u = k.delta + T * W
    k.x = k.u + T * W
    k.gy = k.x + T * W
    k.y = k.gy + T * W
    k.dz = k.y + T * W
    k.ddelta = k.dz + T * W
    k.du = k.ddelta + T * W
    k.dx = k.du + T * W
    k.scale = k.dx + T * W
    k.rest = k.scale + T * W
    k.states = k.rest + T * W
    k.zeros = k.states + (T + 1) * W
    k.da = k.zeros + W
    k.lane_b = k.da + W
    k.lane_c = k.lane_b + N * T * LANES
    memset(k.zeros, 0, W * sizeof(float))


cdef void begin_tile(const Job *job, Chunk *k, Py_ssize_t first, Py_ssize_t width, const float *bias,
                     const float *skip, float *dd) noexcept nogil:
    """Load a tile's inputs for a chunk, take dy back through the gate and the D skip, clear the sums."""
    cdef Py_ssize_t rows = k.steps
    load_rows(k.delta, job.delta + k.batch * job.delta_b + k.t0 * job.delta_t + first, job.delta_t, rows, width)
    load_rows(k.u, job.u + k.batch * job.u_b + k.t0 * job.u_t + first, job.u_t, rows, width)
    make_delta(k.delta, bias, rows, job.softplus)
    memcpy(k.x, k.u, rows * W * sizeof(float))
    if not job.zoh:
        multiply_rows(k.x, k.delta, rows)
    if job.z != NULL:
        load_rows(k.y, job.dy + k.batch * job.dy_b + k.t0 * job.dy_t + first, job.dy_t, rows, width)
        load_rows(k.rest, job.z + k.batch * job.z_b + k.t0 * job.z_t + first, job.z_t, rows, width)
        gate_backward(k.gy, k.dz, k.y, k.rest, rows)
        skip_rows(k.y, k.u, skip, rows)
    else:
        load_rows(k.gy, job.dy + k.batch * job.dy_b + k.t0 * job.dy_t + first, job.dy_t, rows, width)
    skip_backward(k.du, dd, k.gy, k.u, skip, rows)
    memset(k.ddelta, 0, rows * W * sizeof(float))
    memset(k.dx, 0, rows * W * sizeof(float))


cdef void recompute_state(const Job *job, Chunk *k, Py_ssize_t n, const float *a2, const float *ia) noexcept nogil:
    """states[1..] of state n from states[0], and y's share of it where the gate needs y."""
    cdef Py_ssize_t t
    cdef const float *before
    cdef const float *b = job.b + k.batch * job.b_b + k.t0 * job.b_t + n
    cdef const float *c = job.c + k.batch * job.c_b + k.t0 * job.c_t + n
    for t in range(k.steps):
        before = k.zeros if k.start != NULL and k.start[t] else k.states + t * W
        if job.zoh:
            keep_zoh(k.states + (t + 1) * W, k.scale + t * W, k.rest + t * W, before, k.delta + t * W, k.x + t * W,
                     a2, ia, b[t * job.b_t])
        else:
            keep_euler(k.states + (t + 1) * W, k.scale + t * W, k.rest + t * W, before, k.delta + t * W,
                       k.x + t * W, a2, b[t * job.b_t])
        if job.z != NULL:
            add_scaled(k.y + t * W, k.states + (t + 1) * W, c[t * job.c_t])


cdef void walk_back(const Job *job, Chunk *k, Py_ssize_t n, const float *a, const float *ia,
                    float *carry) noexcept nogil:
    """The chunk's steps of state n, last to first."""
    cdef Py_ssize_t t
    cdef const float *before
    cdef const float *b = job.b + k.batch * job.b_b + k.t0 * job.b_t + n
    cdef const float *c = job.c + k.batch * job.c_b + k.t0 * job.c_t + n
    cdef float *lane_b = k.lane_b + n * T * LANES
    cdef float *lane_c = k.lane_c + n * T * LANES
    memset(k.da, 0, W * sizeof(float))
    for t in range(k.steps - 1, -1, -1):
        before = k.zeros if k.start != NULL and k.start[t] else k.states + t * W
        if job.zoh:
            back_zoh(k.delta + t * W, k.x + t * W, k.gy + t * W, k.scale + t * W, k.rest + t * W, before,
                     k.states + (t + 1) * W, a, ia, b[t * job.b_t], c[t * job.c_t], carry, k.da, k.ddelta + t * W,
                     k.du + t * W, lane_b + t * LANES, lane_c + t * LANES)
        else:
            back_euler(k.delta + t * W, k.x + t * W, k.gy + t * W, k.scale + t * W, k.rest + t * W, before,
                       k.states + (t + 1) * W, a, b[t * job.b_t], c[t * job.c_t], carry, k.da, k.ddelta + t * W,
                       k.dx + t * W, lane_b + t * LANES, lane_c + t * LANES)
        if k.start != NULL and k.start[t]:
            memset(carry, 0, W * sizeof(float))


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
    cdef Py_ssize_t N = job.N, E = job.E
    cdef Py_ssize_t batch = task // job.n_slabs, slab_index = task % job.n_slabs
    cdef Py_ssize_t slab_start = slab_index * job.slab
    cdef Py_ssize_t slab_end = min(slab_start + job.slab, E)
    cdef Py_ssize_t tiles = (slab_end - slab_start + W - 1) // W
    cdef Py_ssize_t length = job.lengths[batch] if job.lengths != NULL else job.L
    cdef Py_ssize_t chunk, first, width, i, n, t, j, at
    cdef float *a2 = job.scratch + worker * job.scratch_floats     # [tiles][N][W] each
    cdef float *ia = a2 + job.slab * N
    cdef float *a = ia + job.slab * N
    cdef float *carry = a + job.slab * N
    cdef float *da = carry + job.slab * N
    cdef float *bias = da + job.slab * N                            # [tiles][W] each
    cdef float *skip = bias + job.slab
    cdef float *dd = skip + job.slab
    cdef float *dbias = dd + job.slab
    cdef float *part_b = job.part_db + (slab_index * job.B + batch) * job.L * N
    cdef float *part_c = job.part_dc + (slab_index * job.B + batch) * job.L * N
    cdef Chunk k

    lay_out(&k, dbias + job.slab, N)
    k.batch = batch
    memset(da, 0, job.slab * N * sizeof(float))
    memset(dd, 0, job.slab * sizeof(float))
    memset(dbias, 0, job.slab * sizeof(float))
    for i in range(tiles):
        first = slab_start + i * W
        width = min(<Py_ssize_t> W, slab_end - first)
        load_decay(a2 + i * N * W, ia + i * N * W, a + i * N * W, job, first, width)
        load_state(carry + i * N * W, offset(job.d_final, batch * job.d_final_b + first * job.d_final_e),
                   job.d_final_e, N, width)
        load_vector(bias + i * W, offset(job.bias, first), width)
        load_vector(skip + i * W, offset(job.d, first), width)
    clear_beyond(job, batch, length, slab_start, slab_end - slab_start, part_b, part_c)

    for chunk in range((length - 1) // T, -1, -1):
        k.t0 = chunk * T
        k.steps = min(<Py_ssize_t> T, length - k.t0)
        k.start = restarts(job, batch, k.t0)
        memset(k.lane_b, 0, 2 * N * T * LANES * sizeof(float))
        for i in range(tiles):
            first = slab_start + i * W
            width = min(<Py_ssize_t> W, slab_end - first)
            begin_tile(job, &k, first, width, bias + i * W, skip + i * W, dd + i * W)
            for n in range(N):
                at = (i * N + n) * W
                load_vector(k.states, job.checkpoints + ((batch * job.n_chunks + chunk) * N + n) * E + first, width)
                recompute_state(job, &k, n, a2 + at, ia + at)
                walk_back(job, &k, n, a + at, ia + at, carry + at)
                for j in range(W):
                    da[at + j] += k.da[j]
            end_tile(job, &k, first, width, dbias + i * W)
        for t in range(k.steps):
            for n in range(N):
                part_b[(k.t0 + t) * N + n] = sum_lanes(k.lane_b + (n * T + t) * LANES)
                part_c[(k.t0 + t) * N + n] = sum_lanes(k.lane_c + (n * T + t) * LANES)

    for i in range(tiles):
        first = slab_start + i * W
        width = min(<Py_ssize_t> W, slab_end - first)
        for n in range(N):
            memcpy(job.part_da + (batch * N + n) * E + first, da + (i * N + n) * W, width * sizeof(float))
        memcpy(job.part_dd + batch * E + first, dd + i * W, width * sizeof(float))
        memcpy(job.part_dbias + batch * E + first, dbias + i * W, width * sizeof(float))
        if job.d_initial != NULL:
            store_state(job.d_initial + batch * job.d_initial_b + first * job.d_initial_e, job.d_initial_e,
                        carry + i * N * W, N, width)


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
