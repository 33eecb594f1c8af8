// Matrix products of large operands: what `linear.wgsl` computes, where all rows are aligned to vectors.
//
//     z (m, n) = alpha * op(x) op(y) + bias, or added to z;  TRANS_X, TRANS_Y and slices of k as there
//
// A workgroup of 256 makes a tile of 128 x 128, a thread 8 x 8 of it: four blocks of 4 x 4, 64 apart, so that
// neighbouring threads read neighbouring vectors of workgroup memory. Tiles of 16 along k are double-buffered, 32
// KiB in all: while one is multiplied, half of the threads load the next one of x and the other half that of y,
// 4 x 4 elements each, which are transposed in registers where they lie along k. Vectors of a tile are exchanged
// by k (`spread`) so that neither writing nor reading them meets twice in a bank.
//
// Beyond the edges of x and y, rows are taken twice (what they give is not stored), and beyond the end of k zeros.

struct Params {
    m: u32,
    n: u32,
    k: u32,
    k_slice: u32,       // of k for each workgroup_id.z, a multiple of 16
    x_offset: u32,      // offsets and strides are in vectors here
    x_stride: u32,
    y_offset: u32,
    y_stride: u32,
    z_offset: u32,
    z_stride: u32,
    slice_stride: u32,
    bias_offset: u32,
    m_first: u32,
    alpha: f32,
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> y: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> bias: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> z: array<vec4<f32>>;
@group(1) @binding(0) var<uniform> p: Params;

override TRANS_X: bool = false;
override TRANS_Y: bool = true;
override BIAS: bool = false;
override ACCUMULATE: bool = false;

const TILE: u32 = 128u;
const DEEP: u32 = 16u;
const HALF: u32 = 512u;  // vectors of one buffer: DEEP * TILE / 4

var<workgroup> xs: array<vec4<f32>, 1024>;
var<workgroup> ys: array<vec4<f32>, 1024>;

// The place of vector i of row k of a tile.
fn spread(k: u32, i: u32) -> u32 { return k * 32u + (i ^ (2u * (k / 4u))); }

struct Four { a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32> }

// Four vectors of x or y, zeros where they are not inside.
fn fetch(for_y: bool, at: vec4<u32>, inside: vec4<bool>) -> Four {
    var f: Four;
    if (for_y) {
        f = Four(y[at.x], y[at.y], y[at.z], y[at.w]);
    } else {
        f = Four(x[at.x], x[at.y], x[at.z], x[at.w]);
    }
    let zero = vec4<f32>();
    return Four(
        select(zero, f.a, inside.x), select(zero, f.b, inside.y),
        select(zero, f.c, inside.z), select(zero, f.d, inside.w),
    );
}

fn store(row: u32, col: u32, base: u32, values: vec4<f32>) {
    if (row < p.m && col < p.n) {
        let at = base + row * p.z_stride + col / 4u;
        var value = p.alpha * values;
        if (BIAS) { value += bias[p.bias_offset + col / 4u]; }
        if (ACCUMULATE) { value += z[at]; }
        z[at] = value;
    }
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let m0 = (p.m_first + group.y) * TILE;
    let n0 = group.x * TILE;
    let k_start = group.z * p.k_slice;
    let k_stop = min(k_start + p.k_slice, p.k);

    // ---- what this thread loads: 4 x 4 elements of x (the first half of the threads) or y ----
    let for_y = thread >= 128u;
    let t = thread & 127u;
    // Along k where that is how they lie in memory, so that neighbours read neighbouring vectors.
    let along_k = select(!TRANS_X, TRANS_Y, for_y);
    let block = select(t & 31u, t >> 2u, along_k);  // of 4 along m or n
    let quad = select(t >> 5u, t & 3u, along_k);    // of 4 along k
    let extent = select(p.m, p.n, for_y);
    let origin = select(m0, n0, for_y);
    let stride = select(p.x_stride, p.y_stride, for_y);
    let offset = select(p.x_offset, p.y_offset, for_y);
    let line = vec4<u32>(origin + 4u * block) + vec4<u32>(0u, 1u, 2u, 3u);
    let deep = vec4<u32>(k_start + 4u * quad) + vec4<u32>(0u, 1u, 2u, 3u);
    // Where the four vectors are at first, and how much further on at the next tile.
    var at = select(
        vec4<u32>(offset + min(line.x, extent - 4u) / 4u) + deep * stride,
        vec4<u32>(offset + deep.x / 4u) + min(line, vec4<u32>(extent - 1u)) * stride,
        along_k,
    );
    let onward = select(DEEP * stride, DEEP / 4u, along_k);
    // The element of k that each of them begins with.
    var k_at = select(deep, vec4<u32>(deep.x), along_k);
    var f = fetch(for_y, at, k_at < vec4<u32>(k_stop));

    // ---- what it computes ----
    let tx = (thread & 7u) + ((thread >> 5u) & 1u) * 8u;
    let ty = ((thread >> 3u) & 3u) + (thread >> 6u) * 4u;
//#repeat i 8
    var c${i}l = vec4<f32>();
    var c${i}r = vec4<f32>();
//#endrepeat

    var buffer = 0u;
    for (var k = k_start; ; k += DEEP) {
        if (along_k) {
            f = Four(
                vec4<f32>(f.a.x, f.b.x, f.c.x, f.d.x), vec4<f32>(f.a.y, f.b.y, f.c.y, f.d.y),
                vec4<f32>(f.a.z, f.b.z, f.c.z, f.d.z), vec4<f32>(f.a.w, f.b.w, f.c.w, f.d.w),
            );
        }
        let to = buffer + spread(4u * quad, block);
        if (for_y) {
            ys[to] = f.a;
            ys[to + 32u] = f.b;
            ys[to + 64u] = f.c;
            ys[to + 96u] = f.d;
        } else {
            xs[to] = f.a;
            xs[to + 32u] = f.b;
            xs[to + 64u] = f.c;
            xs[to + 96u] = f.d;
        }
        // One barrier is enough: whoever writes this buffer again has passed the next one, as has everybody
        // who reads it now.
        workgroupBarrier();
        let more = k + DEEP < k_stop;
        if (more) {
            at += vec4<u32>(onward);
            k_at += vec4<u32>(DEEP);
            f = fetch(for_y, at, k_at < vec4<u32>(k_stop));
        }
//#repeat d 16
        {
            let u0 = xs[buffer + spread(${d}u, ty)];
            let u1 = xs[buffer + spread(${d}u, ty + 16u)];
            let v0 = ys[buffer + spread(${d}u, tx)];
            let v1 = ys[buffer + spread(${d}u, tx + 16u)];
            c0l = fma(vec4<f32>(u0.x), v0, c0l);
            c0r = fma(vec4<f32>(u0.x), v1, c0r);
            c1l = fma(vec4<f32>(u0.y), v0, c1l);
            c1r = fma(vec4<f32>(u0.y), v1, c1r);
            c2l = fma(vec4<f32>(u0.z), v0, c2l);
            c2r = fma(vec4<f32>(u0.z), v1, c2r);
            c3l = fma(vec4<f32>(u0.w), v0, c3l);
            c3r = fma(vec4<f32>(u0.w), v1, c3r);
            c4l = fma(vec4<f32>(u1.x), v0, c4l);
            c4r = fma(vec4<f32>(u1.x), v1, c4r);
            c5l = fma(vec4<f32>(u1.y), v0, c5l);
            c5r = fma(vec4<f32>(u1.y), v1, c5r);
            c6l = fma(vec4<f32>(u1.z), v0, c6l);
            c6r = fma(vec4<f32>(u1.z), v1, c6r);
            c7l = fma(vec4<f32>(u1.w), v0, c7l);
            c7r = fma(vec4<f32>(u1.w), v1, c7r);
        }
//#endrepeat
        if (!more) { break; }
        buffer = HALF - buffer;
    }

    let base = p.z_offset + group.z * p.slice_stride;
    let row = m0 + 4u * ty;
    let col = n0 + 4u * tx;
    store(row, col, base, c0l);
    store(row, col + 64u, base, c0r);
    store(row + 1u, col, base, c1l);
    store(row + 1u, col + 64u, base, c1r);
    store(row + 2u, col, base, c2l);
    store(row + 2u, col + 64u, base, c2r);
    store(row + 3u, col, base, c3l);
    store(row + 3u, col + 64u, base, c3r);
    store(row + 64u, col, base, c4l);
    store(row + 64u, col + 64u, base, c4r);
    store(row + 65u, col, base, c5l);
    store(row + 65u, col + 64u, base, c5r);
    store(row + 66u, col, base, c6l);
    store(row + 66u, col + 64u, base, c6r);
    store(row + 67u, col, base, c7l);
    store(row + 67u, col + 64u, base, c7r);
}
