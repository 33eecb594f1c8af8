// The scan's gradients (SPEC 3) without subgroup operations: one invocation walks one channel of one
// batch row backwards, T steps of four states at a time. From the state kept before T steps it computes
// those steps again, keeping the states and the parts of exp(Delta A) in registers, then walks back:
//
//   dh = gy c + carry;  dC += gy h_t;  carry = dh e,  e = exp(z) = s (1 + p),  z = Delta A
//   zoh, with g = expm1(z) / A = Delta phi(z):
//     dB += dh u g;  du += dh b g;  dDelta += carry (A h_{t-1} + u b)
//     dA += carry h_{t-1} Delta + dh u b Delta^2 phi'(z)
//   euler, with x = Delta u, whose gradient goes on to Delta and u afterwards:
//     dB += dh x;  dx += dh b;  dDelta += carry h_{t-1} A;  dA += carry h_{t-1} Delta
//
// dB and dC are sums over channels: each workgroup adds up its 64 in a fixed order and stores its share
// in `scratch`; scan_reduce.wgsl adds up the shares. scratch holds, in vec4:
//
//   carry    (batch, segment, E, NJ)   gradient of the state at the segment's end, then at its beginning
//   dA       (batch, segment, E, NJ)
//   vectors  (batch, segment, E)       gradients of (delta_bias, D, 0, 0)
//   shares   (block, batch, L, 2 NJ)   dB, dC
//
// With a gate, dy comes through it here if the device has enough bindings (READ_Z); otherwise
// scan_gate.wgsl has put gy into du and turns the y that is left in dz into dz.

//#include scan_math

override NJ: u32 = 4;          // vec4 of states a channel
override T: u32 = 8;           // steps between kept states; a multiple of 4
override ZOH: bool = true;
override SOFTPLUS: bool = true;
override MASKED: bool = false;  // there are restarts or lengths
override READ_DY: bool = false; // the gradient comes from dy, not from du
override READ_Z: bool = false;  // it passes the gate here
override WRITE_DZ: bool = false;

struct Params {
    batch: u32,
    length: u32,
    row_step: u32,       // rows from one batch row to the next
    width: u32,
    slots: u32,          // kept states a batch row
    segments: u32,
    segment_chunks: u32,
    rows_at: u32,        // offsets in packed, in vec4
    flags_at: u32,
    d_a_at: u32,         // offsets in scratch, in vec4; carry is at 0
    d_vectors_at: u32,
    shares_at: u32,
    u: vec2<u32>,        // views: offset and row stride, in elements
    delta: vec2<u32>,
    z: vec2<u32>,
    dy: vec2<u32>,
    du: vec2<u32>,
    ddelta: vec2<u32>,
    dz: vec2<u32>,
}

@group(1) @binding(0) var<uniform> params: Params;
@group(0) @binding(0) var<storage, read> u_in: array<f32>;
@group(0) @binding(1) var<storage, read> delta_in: array<f32>;
//#if READ_Z
@group(0) @binding(2) var<storage, read> z_in: array<f32>;
//#endif
//#if READ_DY
@group(0) @binding(3) var<storage, read> dy_in: array<f32>;
//#endif
@group(0) @binding(4) var<storage, read> packed: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> kept: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> du_out: array<f32>;
@group(0) @binding(7) var<storage, read_write> ddelta_out: array<f32>;
//#if WRITE_DZ
@group(0) @binding(8) var<storage, read_write> dz_out: array<f32>;
//#endif
@group(0) @binding(9) var<storage, read_write> scratch: array<vec4<f32>>;

const LANES: u32 = 64;

var<workgroup> shares: array<vec4<f32>, 512>;   // [4 steps][dB, dC][lane]
var<workgroup> partial: array<vec4<f32>, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let inside = group.x * LANES + lane < params.width;
    let e = min(group.x * LANES + lane, params.width - 1u);
    let batch = group.y;
    let segment = group.z;
    let vectors = packed[e * (NJ + 1u) + NJ];
    let chunks = (params.length + T - 1u) / T;
    let first = segment * params.segment_chunks;
    let count = min(first + params.segment_chunks, chunks) - first;
    let quads = (params.length + 3u) / 4u;
    let place = (batch * params.segments + segment) * params.width + e;
    let share_row = (group.x * params.batch + batch) * params.length;

    var carry: array<vec4<f32>, NJ>;
    var d_a: array<vec4<f32>, NJ>;
    var d_bias = 0.0;
    var d_d = 0.0;
    for (var j = 0u; j < NJ; j = j + 1u) {
        carry[j] = vec4<f32>(0.0);
        if inside {
            carry[j] = scratch[place * NJ + j];
        }
        d_a[j] = vec4<f32>(0.0);
    }

    for (var turn = 0u; turn < count; turn = turn + 1u) {
        let chunk = first + count - 1u - turn;
        let t0 = chunk * T;
        var flags: array<f32, T>;
        var steps: array<f32, T>;
        var plain: array<f32, T>;       // u
        var inputs: array<f32, T>;      // u, or Delta u for euler
        var gy: array<f32, T>;          // gradient of y before the gate
        var y: array<f32, T>;
        var dz: array<f32, T>;
        var du: array<f32, T>;
        var dx: array<f32, T>;          // gradient of `inputs`
        var ddelta: array<f32, T>;
        var sum_d = 0.0;
        for (var i = 0u; i < T; i = i + 1u) {
            let t = t0 + i;
            var flag = 2.0;
            if inside && t < params.length {
                flag = 0.0;
                if MASKED {
                    flag = packed[params.flags_at + batch * quads + t / 4u][t % 4u];
                }
            }
            flags[i] = flag;
            steps[i] = 0.0;
            plain[i] = 0.0;
            inputs[i] = 0.0;
            gy[i] = 0.0;
            dz[i] = 0.0;
            if flag < 2.0 {
                let row = batch * params.row_step + t;
                let raw = delta_in[params.delta.x + row * params.delta.y + e] + vectors.x;
                var step = raw;
                if SOFTPLUS {
                    step = softplus(raw);
                }
                let x = u_in[params.u.x + row * params.u.y + e];
                steps[i] = step;
                plain[i] = x;
                // The exponential below loses a NaN in Delta: the input takes it along.
                inputs[i] = select(select(step * x, x, ZOH), raw, is_nan(raw));
                //#if READ_DY
                var g = dy_in[params.dy.x + row * params.dy.y + e];
                //#else
                var g = du_out[params.du.x + row * params.du.y + e];
                //#endif
                //#if READ_Z
                let gate = z_in[params.z.x + row * params.z.y + e];
                let open = sigmoid(gate);
                dz[i] = g * (open * (1.0 + gate * (1.0 - open)));
                g = g * (gate * open);
                //#endif
                gy[i] = g;
            }
            du[i] = gy[i] * vectors.y;
            y[i] = plain[i] * vectors.y;
            sum_d = sum_d + gy[i] * plain[i];
            dx[i] = 0.0;
            ddelta[i] = 0.0;
        }
        d_d = d_d + sum_d;

        for (var j = 0u; j < NJ; j = j + 1u) {
            let a = packed[e * (NJ + 1u) + j];
            let a2 = a * LOG2E;
            let ia = 1.0 / a;
            let start = kept[((batch * params.slots + chunk) * params.width + e) * NJ + j];
            var state = start;
            var after: array<vec4<f32>, T>;
            var parts_s: array<vec4<f32>, T>;
            var parts_p: array<vec4<f32>, T>;
            for (var i = 0u; i < T; i = i + 1u) {
                let row = params.rows_at + (batch * params.length + min(t0 + i, params.length - 1u)) * (2u * NJ);
                let vb = packed[row + j];
                if MASKED && flags[i] == 1.0 {
                    state = vec4<f32>(0.0);
                }
                let e2 = exp2_parts(steps[i] * a2);
                parts_s[i] = e2.s;
                parts_p[i] = e2.p;
                if ZOH {
                    state = decayed(e2, state) + minus_one(e2) * (inputs[i] * vb * ia);
                } else {
                    state = decayed(e2, state) + inputs[i] * vb;
                }
                after[i] = state;
                if WRITE_DZ {
                    y[i] = y[i] + dot(state, packed[row + NJ + j]);
                }
            }
            var back = carry[j];
            var sum_a = vec4<f32>(0.0);
            for (var part = 0u; part < T / 4u; part = part + 1u) {
                let base = T - 4u - 4u * part;
                for (var k = 0u; k < 4u; k = k + 1u) {
                    let i = base + 3u - k;
                    let row = params.rows_at
                        + (batch * params.length + min(t0 + i, params.length - 1u)) * (2u * NJ);
                    let vb = packed[row + j];
                    let vc = packed[row + NJ + j];
                    let restart = MASKED && flags[i] == 1.0;
                    var before = start;
                    if i > 0u {
                        before = after[i - 1u];
                    }
                    if restart {
                        before = vec4<f32>(0.0);
                    }
                    let e2 = Parts(parts_s[i], parts_p[i]);
                    let dh = gy[i] * vc + back;
                    let through = decayed(e2, dh);
                    let x = inputs[i];
                    var share_b: vec4<f32>;
                    if ZOH {
                        let em1 = minus_one(e2);
                        let dhg = dh * (em1 * ia);
                        let ub = x * vb;
                        share_b = dhg * x;
                        ddelta[i] = ddelta[i] + dot(through, before * a + ub);
                        dx[i] = dx[i] + dot(dhg, vb);
                        sum_a = sum_a + through * before * steps[i]
                            + dh * ub * gain_slope(e2, em1, steps[i] * a, ia, steps[i]);
                    } else {
                        let kept_part = through * before;
                        share_b = dh * x;
                        ddelta[i] = ddelta[i] + dot(kept_part, a);
                        dx[i] = dx[i] + dot(dh, vb);
                        sum_a = sum_a + kept_part * steps[i];
                    }
                    back = select(through, vec4<f32>(0.0), restart);
                    let slot = (2u * (3u - k)) * LANES + lane;
                    // A channel beyond the last has no share, whatever its padding came to.
                    shares[slot] = select(vec4<f32>(0.0), share_b, inside);
                    shares[slot + LANES] = select(vec4<f32>(0.0), gy[i] * after[i], inside);
                }
                workgroupBarrier();
                // Eight lanes add up the 64 entries of each of the eight sums.
                var total = vec4<f32>(0.0);
                for (var k = 0u; k < 8u; k = k + 1u) {
                    total = total + shares[(lane / 8u) * LANES + (lane % 8u) * 8u + k];
                }
                partial[lane] = total;
                workgroupBarrier();
                if lane < 8u {
                    total = partial[lane * 8u];
                    for (var k = 1u; k < 8u; k = k + 1u) {
                        total = total + partial[lane * 8u + k];
                    }
                    let t = t0 + base + lane / 2u;
                    if t < params.length {
                        scratch[params.shares_at + (share_row + t) * (2u * NJ) + (lane % 2u) * NJ + j] = total;
                    }
                }
            }
            carry[j] = back;
            d_a[j] = d_a[j] + sum_a;
        }

        var sum_bias = 0.0;
        for (var i = 0u; i < T; i = i + 1u) {
            let t = t0 + i;
            if inside && t < params.length {
                let row = batch * params.row_step + t;
                var to_u = du[i];
                var to_delta = ddelta[i];
                if ZOH {
                    to_u = to_u + dx[i];
                } else {
                    to_u = to_u + dx[i] * steps[i];
                    to_delta = to_delta + dx[i] * plain[i];
                }
                if SOFTPLUS {
                    to_delta = to_delta * -expm1(-steps[i]);
                }
                let beyond = flags[i] == 2.0;
                to_delta = select(to_delta, 0.0, beyond);
                sum_bias = sum_bias + to_delta;
                du_out[params.du.x + row * params.du.y + e] = select(to_u, 0.0, beyond);
                ddelta_out[params.ddelta.x + row * params.ddelta.y + e] = to_delta;
                //#if WRITE_DZ
                //#if READ_Z
                dz_out[params.dz.x + row * params.dz.y + e] = select(dz[i] * y[i], 0.0, beyond);
                //#else
                dz_out[params.dz.x + row * params.dz.y + e] = y[i];
                //#endif
                //#endif
            }
        }
        d_bias = d_bias + sum_bias;
    }

    if inside {
        for (var j = 0u; j < NJ; j = j + 1u) {
            scratch[place * NJ + j] = carry[j];
            scratch[params.d_a_at + place * NJ + j] = d_a[j];
        }
        scratch[params.d_vectors_at + place] = vec4<f32>(d_bias, d_d, 0.0, 0.0);
    }
}
