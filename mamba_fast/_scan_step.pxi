# One step of the scan, for decoding; included by _scan.pyx.

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
        if delta != delta:
            delta = NAN         # without its sign, which mf_exp2_parts asks for
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
    cdef float s, p, t
    if mf_abs(a) < SMALLEST_A:
        a = SMALLEST_A if a > 0 else -SMALLEST_A
    t = delta * (a * MF_LOG2E)
    t = <float> 127.0 if <float> 127.0 < t else t
    mf_exp2_parts(t, &s, &p)
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
