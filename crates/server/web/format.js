// Numbers, durations and dates as text.

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

export function count(value) {
  return Math.round(value).toLocaleString('en');
}

/** A count with its noun in the singular or plural. */
export function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

export function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit + 1 < UNITS.length) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : value.toFixed(1)} ${UNITS[unit]}`;
}

/** A rate with three significant digits. */
export function rate(value) {
  if (!Number.isFinite(value)) return '–';
  return value >= 100 ? count(value) : value.toFixed(value >= 10 ? 1 : 2);
}

export function percent(part, whole) {
  return whole > 0 ? `${((100 * part) / whole).toFixed(part === whole || part === 0 ? 0 : 1)} %` : '–';
}

/** Milliseconds as the time that a reader waits: 45 ms, 1.3 s, 2 min 5 s. */
export function wait(milliseconds) {
  if (milliseconds < 1000) return `${Math.round(milliseconds)} ms`;
  if (milliseconds < 60_000) return `${(milliseconds / 1000).toFixed(1)} s`;
  return duration(milliseconds / 1000);
}

/** Seconds in the two largest units: 42 s, 5 min 3 s, 2 h 5 min, 3 d 4 h. */
export function duration(seconds) {
  const whole = Math.floor(seconds);
  const steps = [
    [86_400, 'd', 3600, 'h'],
    [3600, 'h', 60, 'min'],
    [60, 'min', 1, 's'],
  ];
  for (const [large, largeName, small, smallName] of steps) {
    if (whole < large) continue;
    const rest = Math.floor((whole % large) / small);
    return `${Math.floor(whole / large)} ${largeName}${rest > 0 ? ` ${rest} ${smallName}` : ''}`;
  }
  return `${whole} s`;
}

/** The group of a list that a date belongs to. */
export function age(milliseconds, now = Date.now()) {
  const midnight = new Date(now).setHours(0, 0, 0, 0);
  if (milliseconds >= midnight) return 'Today';
  if (milliseconds >= midnight - 86_400_000) return 'Yesterday';
  if (milliseconds >= midnight - 7 * 86_400_000) return 'Previous 7 days';
  if (milliseconds >= midnight - 30 * 86_400_000) return 'Previous 30 days';
  return 'Older';
}

/** The first words of a text, on one line. */
export function excerpt(text, length) {
  const line = text.trim().replace(/\s+/g, ' ');
  return line.length > length ? `${line.slice(0, length - 1).trimEnd()}…` : line;
}
