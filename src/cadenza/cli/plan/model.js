// The model of cadenza.planning for strategies of one level, in the same operations in the same order:
// tests/browser/test_plan.py compares its numbers with Python's.
"use strict";
const cadenzaPlan = (() => {
  const LANE = 8 * 2 ** 20, MOST = 2 ** 20, LEAST = 2 ** 16, MESSAGES = 8, BUCKET = 25 * 2 ** 20;
  const CYCLES = 2;
  const up = (a, b) => Math.ceil(a / b);
  const SIZES = {
    fp32: (n) => 4 * n,
    bf16: (n) => 2 * n,
    fp16: (n) => 2 * n,
    int8: (n) => 4 * up(n, 256) + n,
    e3m0: (n) => {
      const blocks = Math.floor(n / 512), rest = n % 512, whole = 292 * blocks;
      if (!rest) return whole;
      const groups = Math.min(32, rest + rest % 2);
      let rows = up(rest, groups);
      rows += (rows * groups) % 2;
      return whole + 4 + groups + Math.floor(rows * groups / 2);
    },
    topk: (n) => {
      const chunk = (width) => {
        const kept = Math.max(1, roundEven(0.02 * width));
        return 3 * Math.floor((kept + 1) / 2) + up(kept * 2, 8) + 4;
      };
      const rest = n % 4096;
      return Math.floor(n / 4096) * chunk(4096) + (rest ? chunk(rest) : 0);
    },
  };
  const BLOCKS = { fp32: 1, bf16: 1, fp16: 1, int8: 256, e3m0: 512, topk: 4096 };
  function roundEven(x) {
    const low = Math.floor(x), over = x - low;
    return over < 0.5 || (over === 0.5 && low % 2 === 0) ? low : low + 1;
  }
  const rowBytes = (members) => Math.floor(Math.floor(LANE / 2 / members) / 64) * 64;
  function longest(row, codec) {
    const size = SIZES[codec], unit = BLOCKS[codec];
    let blocks = Math.max(1, Math.min(Math.floor(MOST / unit), Math.floor(row / size(unit))));
    while (blocks > 1 && size(blocks * unit) > row) blocks -= 1;
    return blocks * unit;
  }
  const kept = new Map();
  function sent(numel, members, codec) {
    const key = `${numel}/${members}/${codec}`;
    if (!kept.has(key)) kept.set(key, countSent(numel, members, codec));
    return kept.get(key);
  }
  function countSent(numel, members, codec) {
    const size = SIZES[codec], unit = BLOCKS[codec], row = rowBytes(members);
    if (codec === "fp32") return Math.floor(2 * (members - 1) * numel * 4 / members);
    let total = 0;
    if (codec === "topk") {
      const most = longest(row, codec);
      for (let at = 0; at < numel; at += most) total += size(Math.min(most, numel - at));
      return (members - 1) * total;
    }
    const even = up(Math.max(LEAST, Math.floor(numel / (members * MESSAGES))), unit) * unit;
    const most = Math.min(longest(row, codec), even);
    for (let at = 0; at < numel;) {
      const each = Math.min(most, up(up(numel - at, members), unit) * unit);
      total += 2 * size(each);
      at += members * each;
    }
    return (members - 1) * total;
  }
  function traffic(numel, codec, place) {
    const members = place.workers;
    if (members < 2 || !numel) return { sent: 0, uplink: 0, turns: 0, slow: 0 };
    const bytes = sent(numel, members, codec);
    const here = Math.min(members, Math.floor(place.workers / place.sites)), outside = members - here;
    const exact = codec === "fp32";
    const uplink = exact ? (outside ? bytes : 0) : Math.floor(here * bytes * outside / (members - 1));
    const turns = exact ? 2 * (members - 1) : 4;
    return { sent: bytes + (members - 1) * place.header_bytes, uplink, turns: turns + 1, slow: outside ? turns + 1 : 0 };
  }
  const transfer = (link, size) => 8 * size / (Math.min(link.up, link.down || link.up) * link.efficiency);
  function wire(load, place) {
    let latency = load.turns * place.link.latency_s, shared = 0;
    if (place.uplink) {
      shared = transfer(place.uplink, load.uplink);
      latency += load.slow * place.uplink.latency_s;
    }
    return Math.max(transfer(place.link, load.sent), shared) + latency;
  }
  function waiting(place, steps) {
    if (place.workers < 2 || !steps) return 0;
    const noise = place.jitter * place.step_s * Math.sqrt(steps) * place.maximum;
    const atAll = 1 - (1 - place.straggle) ** (place.workers * steps);
    return noise + place.straggle_s * Math.max(0, atAll - Math.min(1, place.straggle * steps));
  }
  function faultShare(place, period_s) {
    const faults = place.faults, rate = faults.mean_time_s ? place.workers / faults.mean_time_s : 0;
    if (!rate) return 1;
    if (place.policy === "raise_error") return 1 / (1 + rate * (faults.restart_s + faults.checkpoint_s / 2));
    return 1 / (1 + rate * (place.grace_s + (faults.restart_s + period_s / 2) / place.workers));
  }
  function costs(kind, numel, place) {
    const work = place.work, codec = kind.codec, members = place.workers, load = traffic(numel, codec, place);
    const codec_s = work.scale * work.codec_s[codec];
    const times = codec === "topk" ? 2 + members / 10 : 3 + 1 / members;
    const coded = members > 1 ? times * codec_s : 0;
    const outer = work.scale * (kind.anchored ? work.outer_s : 0);
    const wire_s = wire(load, place), work_s = (coded + outer) * numel;
    return {
      launch: work.scale * work.pack_s * numel,
      away: Math.max(wire_s, work_s) + Math.min(wire_s, work_s) / MESSAGES,
      land: work.scale * work.land_s * numel,
      work: work_s,
    };
  }
  function fragments(kind, place) {
    if (!kind.layers) return [place.parameters];
    const count = up(place.layers, kind.layers), each = Math.floor(place.parameters / place.layers);
    const more = place.parameters % place.layers, sizes = new Array(count).fill(0);
    for (let layer = 0; layer < place.layers; layer += 1) sizes[layer % count] += each + (layer < more ? 1 : 0);
    return sizes;
  }
  function gradients(place) {
    const load = traffic(place.parameters, "fp32", place), size = 4 * place.parameters;
    if (place.workers < 2) return 0;
    let seconds = transfer(place.link, load.sent) + load.turns * place.link.latency_s;
    if (place.uplink) {
      seconds = Math.max(seconds, transfer(place.uplink, load.uplink) + load.slow * place.uplink.latency_s);
    }
    return Math.max(seconds - 2 / 3 * place.step_s, seconds / Math.max(1, up(size, BUCKET)));
  }
  // Seconds that a step takes in the long run: rounds are played as the engine holds them.
  function played(kind, period, place) {
    const pace = place.step_s * place.slowest, sizes = fragments(kind, place), cost = sizes.map((n) => costs(kind, n, place));
    const turns = sizes.map((_, i) => Math.floor((i + 1) * period / sizes.length));
    const delay = kind.delay, cycle = period * (up(delay, period) || 1);
    const run = { now: 0, step: 0, met: 0, free: 0, pending: new Map(), next: turns.slice() };
    const advance = (to) => { run.now += (to - run.step) * pace; run.step = to; };
    const land = (i) => {
      const [, done] = run.pending.get(i);
      run.pending.delete(i);
      run.now = Math.max(run.now, done) + cost[i].land;
    };
    const launch = (i) => {
      if (run.next[i] !== run.step) return;
      if (run.pending.has(i)) land(i);
      const one = cost[i], wait = waiting(place, run.step - run.met);
      run.met = run.step;
      if (delay) {
        run.free = Math.max(run.now + one.launch, run.free) + one.away + wait;
        run.pending.set(i, [run.step + delay, run.free]);
        run.now += one.launch + place.work.contention * one.work;
      } else {
        run.now = Math.max(run.now, run.free) + (one.launch + one.away + one.land) + wait;
      }
      run.next[i] += period;
    };
    const until = (last) => {
      for (;;) {
        const at = Math.min(...run.next, ...[...run.pending.values()].map(([step]) => step));
        if (at > last) break;
        advance(at);
        for (const [i, [step]] of [...run.pending]) if (step <= at) land(i);
        sizes.forEach((_, i) => launch(i));
      }
      advance(last);
    };
    until(CYCLES * cycle);
    const before = run.now;
    until(2 * CYCLES * cycle);
    return (run.now - before) / (CYCLES * cycle);
  }
  function utilisation(kind, period, place) {
    let seconds, steps = period;
    if (kind.name === "ddp") {
      steps = 1;
      seconds = place.step_s * place.slowest + gradients(place) + waiting(place, place.workers > 1 ? 1 : 0);
    } else {
      seconds = played(kind, period, place);
    }
    const left = kind.name === "ddp" ? faultShare({ ...place, policy: "raise_error" }, steps * seconds)
      : faultShare(place, steps * seconds);
    return place.step_s / (seconds / left);
  }
  function least(kind, place) {
    return Math.max(1, fragments(kind, place).length, kind.delay + 1);
  }
  function smallestPeriod(kind, target, place) {
    let low = least(kind, place), high = 2 ** 16;
    if (kind.name === "ddp") return utilisation(kind, 1, place) >= target ? 1 : null;
    if (utilisation(kind, high, place) < target) return null;
    while (low < high) {
      const middle = Math.floor((low + high) / 2);
      if (utilisation(kind, middle, place) >= target) high = middle;
      else low = middle + 1;
    }
    return low;
  }
  return { utilisation, smallestPeriod, least, sent };
})();
