'use strict';
// The details box of the item under the pointer or of the selected item.

const detailsBox = document.getElementById('details');

function lifetimeText(s) {
  const whole = S.start[s] === 0 && S.end[s] >= plan.steps;
  return whole ? `the whole run (steps 0 to ${plan.steps - 1})` : `steps ${S.start[s]} to ${S.end[s] - 1}`;
}

// What a rank sends for collectives.
function sentText(sent) {
  return sent ? `, ${bytesText(sent)} sent to other ranks` : '';
}

function nodeLines(row) {
  return [
    ['operation', T[N.operation[row]]],
    ['result', `${T[N.dtype[row]]} ${T[N.shape[row]] || 'scalar'}, ${bytesText(N.bytes[row])}`],
    ['work', `${countText(N.operations[row])} operations, ${bytesText(N.traffic[row])} memory traffic${sentText(N.sent[row])}`],
    ['executed', `step ${N.node[row]}, in split ${N.split[row]} on ${plan.backends[plan.splits[N.split[row]].backend].backend}`],
    ['placement', T[N.why[row]]],
  ];
}

function describeStorage(s) {
  const lines = [];
  const row = rowOfNode(S.node[s]);
  lines.push(['usage', USAGES[S.usage[s]].name]);
  if (row >= 0) lines.push(['operation', T[N.operation[row]]]);
  lines.push(['tensor', `${T[S.dtype[s]]} ${T[S.shape[s]] || 'scalar'}`]);
  lines.push(['bytes', `${bytesText(S.bytes[s])} (${S.bytes[s].toLocaleString('en')})`]);
  lines.push(['device', plan.backends[S.backend[s]].backend]);
  if (S.chunk[s] >= 0) lines.push(['address', `${S.offset[s].toLocaleString('en')} in buffer ${S.chunk[s]}`]);
  if (S.mapped[s]) lines.push(['memory', 'memory-mapped from the file']);
  if (S.packed[s]) lines.push(['memory', 'packed into the layout of this device while loading']);
  lines.push(['lifetime', lifetimeText(s)]);
  if (T[S.why[s]]) lines.push(['placement', T[S.why[s]]]);
  const nodes = nodesIn(s);
  if (nodes.length > 1) {
    const shown = nodes.slice(0, 6).map((n) => `${T[N.name[n]]} (step ${N.node[n]})`);
    if (nodes.length > 6) shown.push(`and ${nodes.length - 6} more`);
    lines.push(['results, in order', shown.join(', ')]);
  }
  return { title: T[S.name[s]], lines };
}

function describeSplit(index) {
  const split = plan.splits[index];
  const reads = split.inputs.map((copy) => `${plan.copies[copy].name} (${bytesText(plan.copies[copy].bytes)})`);
  return {
    title: `split ${index} on ${plan.backends[split.backend].backend}`,
    lines: [
      ['contents', split.label],
      ['nodes', `${split.node_count}, steps ${split.first} to ${split.last}`],
      ['work', `${countText(split.operations)} operations, ${bytesText(split.traffic)} memory traffic${sentText(split.sent)}`],
      ['time', `≈ ${secondsText(split.seconds)} (from ${plan.measured ? 'measured limits' : 'nominal figures'})`],
      ['first node', stepName(split.first)],
      ['last node', stepName(split.last)],
      ['waits for', reads.length ? `copies of ${reads.slice(0, 5).join(', ')}${reads.length > 5 ? ' …' : ''}` : 'no copies'],
    ],
  };
}

function describeArrow(index) {
  const arrow = arrows[index];
  const reader = plan.splits[arrow.reader];
  const names = arrow.copies.map((copy) => `${plan.copies[copy].name} (${bytesText(plan.copies[copy].bytes)})`);
  return {
    title: `${arrow.copies.length === 1 ? 'copy of' : `${plural(arrow.copies.length, 'copy', 'copies')},`} ${bytesText(arrow.bytes)} from ${plan.backends[arrow.from].backend} to ${plan.backends[reader.backend].backend}`,
    lines: [
      ['tensors', names.slice(0, 6).join(', ') + (names.length > 6 ? ` and ${names.length - 6} more` : '')],
      ['produced by', arrow.source === null ? 'no split: it exists before the run (streamed weights, state)' : `split ${arrow.source}`],
      ['read by', `split ${arrow.reader}`],
    ],
  };
}

function describeBuffer(backend) {
  const b = plan.backends[backend];
  const live = [];
  for (let s = 0; s < storageCount; s += 1) {
    if (S.backend[s] === backend && S.chunk[s] >= 0 && S.start[s] <= b.peak_step && b.peak_step < S.end[s]) live.push(s);
  }
  live.sort((x, y) => S.bytes[y] - S.bytes[x]);
  const names = live.slice(0, 6).map((s) => `${T[S.name[s]]} ${bytesText(S.bytes[s])}`);
  return {
    title: `compute buffer of ${b.backend}`,
    lines: [
      ['bytes', `${bytesText(b.compute)} (${b.compute.toLocaleString('en')})`],
      ['lower bound', `${bytesText(b.lower_bound)} (${b.fragmentation.toFixed(1)} % fragmentation)`],
      ['peak', `step ${b.peak_step}: ${stepName(b.peak_step)}`],
      ['live at the peak', names.join(', ') + (live.length > 6 ? ` and ${live.length - 6} more` : '')],
      ['without reuse', bytesText(b.unshared)],
      ['packed by', `${b.strategy}${b.optimal ? ', proved optimal' : ''}`],
    ],
  };
}

function describe(item) {
  switch (item.type) {
    case 'split': return describeSplit(item.index);
    case 'arrow': return describeArrow(item.index);
    case 'buffer': return describeBuffer(item.index);
    case 'node': return { title: T[N.name[item.index]], lines: nodeLines(item.index) };
    default: return describeStorage(item.index);
  }
}

/** Shows the details of an item beside a point on the screen. */
function showDetails(item, x, y, pinned) {
  const { title, lines } = describe(item);
  detailsBox.replaceChildren();
  detailsBox.classList.toggle('pinned', pinned);
  if (pinned) {
    const close = element('button', '×', detailsBox, 'close');
    close.type = 'button';
    close.title = 'Close (Escape)';
    close.addEventListener('click', () => hideDetails(true));
  }
  element('h4', title, detailsBox);
  const list = element('dl', undefined, detailsBox);
  for (const [name, value] of lines) {
    element('dt', name, list);
    element('dd', value, list);
  }
  detailsBox.hidden = false;
  const { offsetWidth: wide, offsetHeight: high } = detailsBox;
  const left = x + 16 + wide < window.innerWidth ? x + 16 : x - wide - 16;
  const top = y + 12 + high < window.innerHeight ? y + 12 : y - high - 12;
  detailsBox.style.left = `${Math.max(6, Math.min(left, window.innerWidth - wide - 6))}px`;
  detailsBox.style.top = `${Math.max(6, Math.min(top, window.innerHeight - high - 6))}px`;
}

function isPinned() {
  return !detailsBox.hidden && detailsBox.classList.contains('pinned');
}

function hideDetails(evenPinned) {
  if (!evenPinned && isPinned()) return false;
  const shown = !detailsBox.hidden;
  detailsBox.hidden = true;
  detailsBox.classList.remove('pinned');
  return shown;
}

/** Announces an item to screen readers. */
function speak(item) {
  const { title, lines } = describe(item);
  document.getElementById('spoken').textContent = `${title}. ${lines.map(([name, value]) => `${name}: ${value}`).join('. ')}`;
}
