# The scan forward: one task; included by _scan.pyx.

cdef Py_ssize_t forward_scratch(Py_ssize_t slab, Py_ssize_t pairs) noexcept nogil:
    return 6 * slab * pairs + 4 * slab + 4 * T * W + 4 * T * pairs + 7 * STAGGER


cdef void forward_task(void *context, Py_ssize_t task, int worker) noexcept nogil:
    cdef Job *job = <Job *> context
    cdef Py_ssize_t N = job.N, E = job.E, states = 2 * job.pairs
    cdef Py_ssize_t batch = task // job.n_slabs
    cdef Py_ssize_t slab_start = (task % job.n_slabs) * job.slab
    cdef Py_ssize_t slab_end = min(slab_start + job.slab, E)
    cdef Py_ssize_t tiles = (slab_end - slab_start + W - 1) // W
    cdef Py_ssize_t length = job.lengths[batch] if job.lengths != NULL else job.L
    cdef Py_ssize_t chunk, t0, steps, first, width, k, n
    cdef float *a2 = job.scratch + worker * job.scratch_floats     # [tiles][states][W] each
    cdef float *ia = a2 + job.slab * states + STAGGER
    cdef float *h = ia + job.slab * states + STAGGER
    cdef float *bias = h + job.slab * states + STAGGER              # [tiles][W] each
    cdef float *skip = bias + job.slab
    cdef float *low = skip + job.slab
    cdef float *high = low + job.slab
    cdef float *delta = high + job.slab                             # [T][W] each
    cdef float *x = delta + T * W + STAGGER
    cdef float *y = x + T * W + STAGGER
    cdef float *gate = y + T * W + STAGGER
    cdef float *b = gate + T * W + STAGGER                          # [T][states] each
    cdef float *c = b + T * states
    cdef float *kept
    cdef Segments segments

    for k in range(tiles):
        first = slab_start + k * W
        width = min(<Py_ssize_t> W, slab_end - first)
        load_decay(a2 + k * states * W, ia + k * states * W, NULL, low + k * W, high + k * W, job, first, width)
        load_state(h + k * states * W, offset(job.initial, batch * job.initial_b + first * job.initial_e),
                   job.initial_e, job, width)
        load_vector(bias + k * W, offset(job.bias, first), width)
        load_vector(skip + k * W, offset(job.d, first), width)

    for chunk in range(job.n_chunks):
        t0 = chunk * T
        if t0 >= length:
            break
        steps = min(<Py_ssize_t> T, length - t0)
        find_segments(&segments, job, batch, t0, steps)
        load_weights(b, job.b + batch * job.b_b + t0 * job.b_t, job.b_t, steps, N, job.pairs)
        load_weights(c, job.c + batch * job.c_b + t0 * job.c_t, job.c_t, steps, N, job.pairs)
        for k in range(tiles):
            first = slab_start + k * W
            width = min(<Py_ssize_t> W, slab_end - first)
            if job.checkpoints != NULL:
                kept = job.checkpoints + (batch * job.n_chunks + chunk) * N * E + first
                for n in range(N):
                    memcpy(kept + n * E, h + (k * states + n) * W, width * sizeof(float))
            load_rows(delta, job.delta + batch * job.delta_b + t0 * job.delta_t + first, job.delta_t, steps, width)
            load_rows(x, job.u + batch * job.u_b + t0 * job.u_t + first, job.u_t, steps, width)
            make_delta(delta, bias + k * W, low + k * W, high + k * W, steps, job.softplus)
            skip_rows(y, x, skip + k * W, steps)
            if not job.zoh:
                multiply_rows(x, delta, steps)
            scan_tile(job, &segments, delta, x, y, b, c, a2 + k * states * W, ia + k * states * W,
                      h + k * states * W)
            if job.z != NULL:
                load_rows(gate, job.z + batch * job.z_b + t0 * job.z_t + first, job.z_t, steps, width)
                gate_rows(y, gate, steps)
            store_rows(job.y + batch * job.y_b + t0 * job.y_t + first, job.y_t, y, steps, width)

    clear_rows(job.y + batch * job.y_b + length * job.y_t + slab_start, job.y_t, job.L - length,
               slab_end - slab_start)
    for k in range(tiles):
        first = slab_start + k * W
        width = min(<Py_ssize_t> W, slab_end - first)
        store_state(job.final + batch * job.final_b + first * job.final_e, job.final_e, h + k * states * W, N, width)
