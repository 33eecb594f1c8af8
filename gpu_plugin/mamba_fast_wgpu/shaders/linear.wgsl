// Matrix products: z (m, n) = alpha * op(x) op(y) + bias, or added to z.
//
//     forward   y = x wT       op(x) = x (m, k), op(y) = yT with y (n, k)     TRANS_Y
//     dx        dx = dy w      op(x) = x (m, k), op(y) = y with y (k, n)
//     dw        dw = dyT x     op(x) = xT with x (k, m), op(y) = y            TRANS_X
//
// A workgroup makes a tile of 64 x 64 results, a thread 4 x 4 of them; tiles of 16 along k pass through
// workgroup memory, transposed where needed so that both are read along m and n. The next tile is loaded into
// registers while the present one is multiplied. With more than one slice of k (workgroup_id.z), slice s writes
// its own (m, n) matrix, s * slice_stride further on, and `reduce:columns` adds the slices in order.

struct Params {
    m: u32,
    n: u32,
    k: u32,
    k_slice: u32,       // of k for each workgroup_id.z
    x_offset: u32,
    x_stride: u32,
    y_offset: u32,
    y_stride: u32,
    z_offset: u32,
    z_stride: u32,
    slice_stride: u32,
    bias_offset: u32,
    m_first: u32,       // the first row of tiles of this dispatch
    alpha: f32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> y: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> z: array<f32>;
@group(1) @binding(0) var<uniform> p: Params;

override TRANS_X: bool = false;
override TRANS_Y: bool = true;
override BIAS: bool = false;
override ACCUMULATE: bool = false;

const TILE: u32 = 64u;
const DEEP: u32 = 16u;
// One more column than needed spreads a transposed write over the banks.
const PITCH: u32 = 68u;

var<workgroup> xs: array<f32, 1088>;  // DEEP * PITCH
var<workgroup> ys: array<f32, 1088>;

fn load_x(row: u32, k: u32, k_stop: u32) -> f32 {
    if (row >= p.m || k >= k_stop) { return 0.0; }
    return x[p.x_offset + select(row * p.x_stride + k, k * p.x_stride + row, TRANS_X)];
}

fn load_y(col: u32, k: u32, k_stop: u32) -> f32 {
    if (col >= p.n || k >= k_stop) { return 0.0; }
    return y[p.y_offset + select(k * p.y_stride + col, col * p.y_stride + k, TRANS_Y)];
}

fn store(row: u32, col: u32, base: u32, values: vec4<f32>) {
    if (row >= p.m) { return; }
    for (var j = 0u; j < 4u; j++) {
        if (col + j < p.n) {
            let at = base + row * p.z_stride + col + j;
            var value = p.alpha * values[j];
            if (BIAS) { value += bias[p.bias_offset + col + j]; }
            if (ACCUMULATE) { value += z[at]; }
            z[at] = value;
        }
    }
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let m0 = (p.m_first + group.y) * TILE;
    let n0 = group.x * TILE;
    let k_start = group.z * p.k_slice;
    let k_stop = min(k_start + p.k_slice, p.k);
    // Where a thread's loads lie in a tile: neighbours take neighbouring elements of memory.
    let xk = select(thread % DEEP, thread / TILE, TRANS_X);
    let xm = select(thread / DEEP, thread % TILE, TRANS_X);
    let xk_step = select(0u, 4u, TRANS_X);
    let xm_step = select(16u, 0u, TRANS_X);
    let yk = select(thread / TILE, thread % DEEP, TRANS_Y);
    let yn = select(thread % TILE, thread / DEEP, TRANS_Y);
    let yk_step = select(4u, 0u, TRANS_Y);
    let yn_step = select(0u, 16u, TRANS_Y);
    let tm = (thread / 16u) * 4u;
    let tn = (thread % 16u) * 4u;
    var c0 = vec4<f32>();
    var c1 = vec4<f32>();
    var c2 = vec4<f32>();
    var c3 = vec4<f32>();
    var fx = vec4<f32>();
    var fy = vec4<f32>();
    for (var j = 0u; j < 4u; j++) {
        fx[j] = load_x(m0 + xm + j * xm_step, k_start + xk + j * xk_step, k_stop);
        fy[j] = load_y(n0 + yn + j * yn_step, k_start + yk + j * yk_step, k_stop);
    }
    for (var k = k_start; k < k_stop; k += DEEP) {
        workgroupBarrier();
        for (var j = 0u; j < 4u; j++) {
            xs[(xk + j * xk_step) * PITCH + xm + j * xm_step] = fx[j];
            ys[(yk + j * yk_step) * PITCH + yn + j * yn_step] = fy[j];
        }
        workgroupBarrier();
        if (k + DEEP < k_stop) {
            for (var j = 0u; j < 4u; j++) {
                fx[j] = load_x(m0 + xm + j * xm_step, k + DEEP + xk + j * xk_step, k_stop);
                fy[j] = load_y(n0 + yn + j * yn_step, k + DEEP + yk + j * yk_step, k_stop);
            }
        }
        for (var d = 0u; d < DEEP; d++) {
            let ax = d * PITCH + tm;
            let ay = d * PITCH + tn;
            let b = vec4<f32>(ys[ay], ys[ay + 1u], ys[ay + 2u], ys[ay + 3u]);
            c0 = fma(vec4<f32>(xs[ax]), b, c0);
            c1 = fma(vec4<f32>(xs[ax + 1u]), b, c1);
            c2 = fma(vec4<f32>(xs[ax + 2u]), b, c2);
            c3 = fma(vec4<f32>(xs[ax + 3u]), b, c3);
        }
    }
    let base = p.z_offset + group.z * p.slice_stride;
    store(m0 + tm, n0 + tn, base, c0);
    store(m0 + tm + 1u, n0 + tn, base, c1);
    store(m0 + tm + 2u, n0 + tn, base, c2);
    store(m0 + tm + 3u, n0 + tn, base, c3);
}
