// The scan's gradients for 13 to 16 states, with subgroup operations: four lanes a channel, 32 channels a
// workgroup, tiles of the 8 steps between two kept states, from the last to the first. Formulas, scratch
// and the ways in which dy comes in are those of scan_backward.wgsl.
//
// dB and dC, eight numbers a lane, are added up over the channels of a subgroup by halving: at each shuffle
// a lane keeps one half of what it has and passes on the other, so that seven shuffles leave 32 lanes one sum
// each. The subgroups' sums meet in workgroup memory.

//#include scan_quad

override ZOH: bool = true;
override SOFTPLUS: bool = true;
override MASKED: bool = false;  // there are restarts or lengths
override READ_DY: bool = false; // the gradient comes from dy, not from du
override READ_Z: bool = false;  // it passes the gate here
override WRITE_DZ: bool = false;
override SPAN: u32 = 32;        // lanes that shuffles may reach: 8, 16 or 32, no more than a subgroup has

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

const GROUPS: u32 = 128u / SPAN;
// Steps between two sums over the subgroups: small subgroups leave more to add up.
const BURST: u32 = select(8u, 4u, SPAN == 8u);

var<workgroup> inputs: array<vec4<f32>, 256>;           // [8][WIDTH] of (Delta, u, gy, flag)
var<workgroup> gates: array<f32, 256>;                  // [8][WIDTH]: dz / y
var<workgroup> weights: array<vec4<f32>, 64>;           // [8][b, c][4]
var<workgroup> shares: array<f32, GROUPS * BURST * 32u>;

struct Loaded {
    delta: vec2<f32>,    // of two steps
    u: vec2<f32>,
    dy: vec2<f32>,
    z: vec2<f32>,
    flag: vec2<f32>,
    h: vec4<f32>,        // the state before the tile
    weight: vec4<f32>,
}

// What invocation `lane` fetches for a chunk: steps lane / 32 and 4 more of channel e_loads; the kept state of
// its own channel e; the lower half of them, one vec4 of b and c.
fn fetch(batch: u32, chunk: u32, e_loads: u32, e: u32, lane: u32) -> Loaded {
    var loaded: Loaded;
    let t = vec2<u32>(chunk * 8u + lane / WIDTH) + vec2<u32>(0u, 4u);
    let rows = batch * params.row_step + min(t, vec2<u32>(params.length - 1u));
    let at_d = params.delta.x + e_loads + rows * params.delta.y;
    loaded.delta = vec2<f32>(delta_in[at_d.x], delta_in[at_d.y]);
    let at_u = params.u.x + e_loads + rows * params.u.y;
    loaded.u = vec2<f32>(u_in[at_u.x], u_in[at_u.y]);
    //#if READ_DY
    let at_y = params.dy.x + e_loads + rows * params.dy.y;
    loaded.dy = vec2<f32>(dy_in[at_y.x], dy_in[at_y.y]);
    //#else
    let at_y = params.du.x + e_loads + rows * params.du.y;
    loaded.dy = vec2<f32>(du_out[at_y.x], du_out[at_y.y]);
    //#endif
    //#if READ_Z
    let at_z = params.z.x + e_loads + rows * params.z.y;
    loaded.z = vec2<f32>(z_in[at_z.x], z_in[at_z.y]);
    //#endif
    loaded.flag = select(vec2<f32>(0.0), vec2<f32>(2.0), t >= vec2<u32>(params.length));
    if MASKED {
        let quads = (params.length + 3u) / 4u;
        let at = params.flags_at + batch * quads;
        if t.x < params.length {
            loaded.flag.x = packed[at + t.x / 4u][t.x % 4u];
        }
        if t.y < params.length {
            loaded.flag.y = packed[at + t.y / 4u][t.y % 4u];
        }
    }
    let row = batch * params.length + min(chunk * 8u + (lane % 64u) / 8u, params.length - 1u);
    loaded.weight = packed[params.rows_at + row * 8u + lane % 8u];
    loaded.h = kept[((batch * params.slots + chunk) * params.width + e) * 4u + lane % 4u];
    return loaded;
}

// One step of one channel into workgroup memory; returns gy u.
fn put_step(raw: f32, given_u: f32, dy: f32, z: f32, flag: f32, at: u32, inside: bool) -> f32 {
    var step = raw;
    if SOFTPLUS {
        step = softplus(raw);
    }
    let live = inside && flag < 2.0;
    var g = dy;
    //#if READ_Z
    let open = sigmoid(z);
    gates[at] = select(0.0, g * (open * fma(z, 1.0 - open, 1.0)), live);
    g = g * (z * open);
    //#endif
    // The exponential loses a NaN in Delta: the input takes it along.
    let u = select(given_u, raw, is_nan(raw));
    inputs[at] = select(vec4<f32>(0.0, 0.0, 0.0, flag), vec4<f32>(step, u, g, flag), live);
    return select(0.0, g * u, live);
}

// Into workgroup memory; returns the sum of gy u over the two steps.
fn put(loaded: Loaded, bias: f32, lane: u32, inside: bool) -> f32 {
    if lane < 64u {
        weights[lane] = loaded.weight;
    }
    let raw = loaded.delta + bias;
    let on = lane + 4u * WIDTH;
    return put_step(raw.x, loaded.u.x, loaded.dy.x, loaded.z.x, loaded.flag.x, lane, inside)
        + put_step(raw.y, loaded.u.y, loaded.dy.y, loaded.z.y, loaded.flag.y, on, inside);
}

// What walks back along a channel.
struct Walk {
    carry: vec4<f32>,
    d_a: vec4<f32>,
    to_delta: f32,       // of the last step walked
    to_x: f32,
    d_b: vec4<f32>,
    d_c: vec4<f32>,
}

struct Channel {
    a: vec4<f32>,
    a2: vec4<f32>,
    ia: vec4<f32>,
}

fn retreat(w: Walk, before: vec4<f32>, now: Step, input: vec4<f32>, weights_at: u32, channel: Channel) -> Walk {
    let vb = weights[weights_at];
    let vc = weights[weights_at + 4u];
    let restart = MASKED && input.w == 1.0;
    var next: Walk;
    let h = select(before, vec4<f32>(0.0), restart);
    let dh = fma(vec4<f32>(input.z), vc, w.carry);
    let decay = is_decay(input.x * channel.a2);
    let through = fma(now.exp, dh, select(dh, vec4<f32>(0.0), decay));
    next.d_c = input.z * now.h;
    if ZOH {
        let em1 = select(now.exp, now.exp - 1.0, decay);
        let dhg = dh * (em1 * channel.ia);
        let ub = input.y * vb;
        next.d_b = dhg * input.y;
        next.to_delta = dot(through, fma(h, channel.a, ub));
        next.to_x = dot(dhg, vb);
        // Delta^2 phi'(z), in closed form where that does not cancel
        let z = input.x * channel.a;
        var p = vec4<f32>(1.188418362e-03);
        p = fma(p, z, vec4<f32>(6.973491516e-03));
        p = fma(p, z, vec4<f32>(3.333400190e-02));
        p = fma(p, z, vec4<f32>(1.249989271e-01));
        p = fma(p, z, vec4<f32>(3.333333135e-01));
        p = fma(p, z, vec4<f32>(5.000000000e-01));
        let far = fma(z, em1 + 1.0, -em1) * (channel.ia * channel.ia);
        let slope = select(far, p * (input.x * input.x), abs(z) < vec4<f32>(0.34657359));
        next.d_a = fma(through * h, vec4<f32>(input.x), fma(dh * ub, slope, w.d_a));
    } else {
        let passed = through * h;
        next.d_b = dh * (input.x * input.y);
        next.to_delta = dot(passed, channel.a);
        next.to_x = dot(dh, vb);
        next.d_a = fma(passed, vec4<f32>(input.x), w.d_a);
    }
    next.carry = select(through, vec4<f32>(0.0), restart);
    return next;
}

// Adds dB and dC up over the channels of SPAN lanes and stores the sums as [group][step][dB, dC][16].
fn share(w: Walk, step: u32, lane: u32) {
    let q = lane % 4u;
    let high = (lane & (SPAN / 2u)) != 0u;
    let x = select(w.d_b, w.d_c, high) + swap4(select(w.d_c, w.d_b, high), SPAN / 2u);
    let at = ((lane / SPAN) * BURST + step % BURST) * 32u + select(0u, 16u, high) + 4u * q;
    if SPAN == 8u {
        shares[at] = x.x;
        shares[at + 1u] = x.y;
        shares[at + 2u] = x.z;
        shares[at + 3u] = x.w;
        return;
    }
    let middle = (lane & (SPAN / 4u)) != 0u;
    let pair = select(x.xy, x.zw, middle) + swap2(select(x.zw, x.xy, middle), SPAN / 4u);
    let pair_at = at + select(0u, 2u, middle);
    if SPAN == 16u {
        shares[pair_at] = pair.x;
        shares[pair_at + 1u] = pair.y;
        return;
    }
    let low = (lane & 4u) != 0u;
    shares[pair_at + select(0u, 1u, low)] =
        select(pair.x, pair.y, low) + swap1(select(pair.y, pair.x, low), 4u);
}

// Adds up the subgroups' sums of BURST steps from t on, four at a time.
fn collect(t: u32, share_row: u32, lane: u32) {
    if lane < BURST * 8u && t + lane / 8u < params.length {
        var total = vec4<f32>(0.0);
        for (var group = 0u; group < GROUPS; group = group + 1u) {
            let at = group * BURST * 32u + lane * 4u;
            total = total + vec4<f32>(shares[at], shares[at + 1u], shares[at + 2u], shares[at + 3u]);
        }
        scratch[params.shares_at + (share_row + t) * 8u + lane] = total;
    }
}

@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    //#if EMULATED
    @builtin(local_invocation_index) lane: u32,
    //#else
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) subgroup_lanes: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    //#endif
) {
    //#if EMULATED
    exchange_lane = lane;
    //#else
    let lane = subgroup * subgroup_lanes + subgroup_lane;
    //#endif
    let q = lane % 4u;
    let channel = lane / 4u;
    let loads_inside = group.x * WIDTH + lane % WIDTH < params.width;
    let e_loads = min(group.x * WIDTH + lane % WIDTH, params.width - 1u);
    let inside = group.x * WIDTH + channel < params.width;
    let e = min(group.x * WIDTH + channel, params.width - 1u);
    let batch = group.y;
    let segment = group.z;
    let a = packed[e * 5u + q];
    let a2 = a * LOG2E;
    let constant = Channel(a, a2, 1.0 / a);
    let skip = packed[e * 5u + 4u].y;
    let bias = packed[e_loads * 5u + 4u].x;
    let chunks = (params.length + 7u) / 8u;
    let first = segment * params.segment_chunks;
    let end = min(first + params.segment_chunks, chunks);
    let place = (batch * params.segments + segment) * params.width + e;
    let share_row = (group.x * params.batch + batch) * params.length;

    var w: Walk;
    w.d_a = vec4<f32>(0.0);
    w.carry = vec4<f32>(0.0);
    if inside {
        w.carry = scratch[place * 4u + q];
    }
    var d_a = vec4<f32>(0.0);
    var d_bias = 0.0;
    var d_d = 0.0;
    var loaded = fetch(batch, end - 1u, e_loads, e, lane);
    for (var chunk = end; chunk > first; chunk = chunk - 1u) {
        let t0 = (chunk - 1u) * 8u;
        d_d = d_d + put(loaded, bias, lane, loads_inside);
        let start = select(vec4<f32>(0.0), loaded.h, inside);
        workgroupBarrier();
        loaded = fetch(batch, max(chunk - 1u, first + 1u) - 1u, e_loads, e, lane);

        let x0 = inputs[channel];
        let x1 = inputs[channel + WIDTH];
        let x2 = inputs[channel + 2u * WIDTH];
        let x3 = inputs[channel + 3u * WIDTH];
        let x4 = inputs[channel + 4u * WIDTH];
        let x5 = inputs[channel + 5u * WIDTH];
        let x6 = inputs[channel + 6u * WIDTH];
        let x7 = inputs[channel + 7u * WIDTH];
        let s0 = advance(kept_of(start, x0), x0.x, x0.y, weights[q], a2, constant.ia);
        let s1 = advance(kept_of(s0.h, x1), x1.x, x1.y, weights[8u + q], a2, constant.ia);
        let s2 = advance(kept_of(s1.h, x2), x2.x, x2.y, weights[16u + q], a2, constant.ia);
        let s3 = advance(kept_of(s2.h, x3), x3.x, x3.y, weights[24u + q], a2, constant.ia);
        let s4 = advance(kept_of(s3.h, x4), x4.x, x4.y, weights[32u + q], a2, constant.ia);
        let s5 = advance(kept_of(s4.h, x5), x5.x, x5.y, weights[40u + q], a2, constant.ia);
        let s6 = advance(kept_of(s5.h, x6), x6.x, x6.y, weights[48u + q], a2, constant.ia);
        let s7 = advance(kept_of(s6.h, x7), x7.x, x7.y, weights[56u + q], a2, constant.ia);
        var y = vec2<f32>(0.0);
        //#if WRITE_DZ
        y.x = sum_quads(vec4<f32>(
            dot(s0.h, weights[4u + q]), dot(s1.h, weights[12u + q]),
            dot(s2.h, weights[20u + q]), dot(s3.h, weights[28u + q])), q);
        y.y = sum_quads(vec4<f32>(
            dot(s4.h, weights[36u + q]), dot(s5.h, weights[44u + q]),
            dot(s6.h, weights[52u + q]), dot(s7.h, weights[60u + q])), q);
        //#endif

        w.d_a = vec4<f32>(0.0);
        w = retreat(w, s6.h, s7, x7, 56u + q, constant);
        share(w, 7u, lane);
        var to_delta = vec4<f32>(0.0, 0.0, 0.0, w.to_delta);
        var to_x = vec4<f32>(0.0, 0.0, 0.0, w.to_x);
        w = retreat(w, s5.h, s6, x6, 48u + q, constant);
        share(w, 6u, lane);
        to_delta.z = w.to_delta;
        to_x.z = w.to_x;
        w = retreat(w, s4.h, s5, x5, 40u + q, constant);
        share(w, 5u, lane);
        to_delta.y = w.to_delta;
        to_x.y = w.to_x;
        w = retreat(w, s3.h, s4, x4, 32u + q, constant);
        share(w, 4u, lane);
        to_delta.x = w.to_delta;
        to_x.x = w.to_x;
        d_bias = d_bias + finish(
            batch, t0 + 4u + q, e, inside, inputs[channel + (4u + q) * WIDTH], gates[channel + (4u + q) * WIDTH],
            sum_quads(to_delta, q), sum_quads(to_x, q), y.y, skip);
        if BURST == 4u {
            workgroupBarrier();
            collect(t0 + 4u, share_row, lane);
            workgroupBarrier();
        }
        w = retreat(w, s2.h, s3, x3, 24u + q, constant);
        share(w, 3u, lane);
        to_delta.w = w.to_delta;
        to_x.w = w.to_x;
        w = retreat(w, s1.h, s2, x2, 16u + q, constant);
        share(w, 2u, lane);
        to_delta.z = w.to_delta;
        to_x.z = w.to_x;
        w = retreat(w, s0.h, s1, x1, 8u + q, constant);
        share(w, 1u, lane);
        to_delta.y = w.to_delta;
        to_x.y = w.to_x;
        w = retreat(w, start, s0, x0, q, constant);
        share(w, 0u, lane);
        to_delta.x = w.to_delta;
        to_x.x = w.to_x;
        d_bias = d_bias + finish(
            batch, t0 + q, e, inside, inputs[channel + q * WIDTH], gates[channel + q * WIDTH],
            sum_quads(to_delta, q), sum_quads(to_x, q), y.x, skip);
        d_a = d_a + w.d_a;
        workgroupBarrier();
        collect(t0, share_row, lane);
    }

    d_bias = d_bias + swap1(d_bias, 1u);
    d_bias = d_bias + swap1(d_bias, 2u);
    // d_d is that of the channel that this invocation fetched for, in four parts.
    workgroupBarrier();
    gates[lane] = d_d;
    workgroupBarrier();
    if inside {
        scratch[place * 4u + q] = w.carry;
        scratch[params.d_a_at + place * 4u + q] = d_a;
        if q == 0u {
            d_d = (gates[channel] + gates[channel + WIDTH])
                + (gates[channel + 2u * WIDTH] + gates[channel + 3u * WIDTH]);
            scratch[params.d_vectors_at + place] = vec4<f32>(d_bias, d_d, 0.0, 0.0);
        }
    }
}

// The state that a step starts from.
fn kept_of(h: vec4<f32>, input: vec4<f32>) -> vec4<f32> {
    if MASKED && input.w == 1.0 {
        return vec4<f32>(0.0);
    }
    return h;
}

// Stores the gradients of one step of one channel; returns that of delta.
fn finish(batch: u32, t: u32, e: u32, inside: bool, input: vec4<f32>, gate: f32, to_delta: f32, to_x: f32, y: f32,
          skip: f32) -> f32 {
    if !inside || t >= params.length {
        return 0.0;
    }
    var du = fma(input.z, skip, to_x);
    var ddelta = to_delta;
    if !ZOH {
        du = fma(input.z, skip, to_x * input.x);
        ddelta = fma(to_x, input.y, ddelta);
    }
    if SOFTPLUS {
        ddelta = ddelta * -expm1(-input.x);
    }
    if input.w == 2.0 {
        du = 0.0;
        ddelta = 0.0;
    }
    let row = batch * params.row_step + t;
    du_out[params.du.x + row * params.du.y + e] = du;
    ddelta_out[params.ddelta.x + row * params.ddelta.y + e] = ddelta;
    //#if WRITE_DZ
    let whole = fma(skip, input.y, y);
    //#if READ_Z
    dz_out[params.dz.x + row * params.dz.y + e] = select(gate * whole, 0.0, input.w == 2.0);
    //#else
    dz_out[params.dz.x + row * params.dz.y + e] = whole;
    //#endif
    //#endif
    return ddelta;
}
