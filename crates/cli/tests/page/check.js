'use strict';
// Opens pages of plans in a real browser and checks what users see. Called by tests/page.rs:
//   check.js FOLDER
// where FOLDER has plan.html and plan.json of a model, names.html of a plan with hostile names, and large.html of a plan of
// 100,000 nodes. Screenshots go to the same folder.
const assert = require('node:assert/strict');
const fs = require('node:fs');
const path = require('node:path');
const { pathToFileURL } = require('node:url');
const { chromium } = require('playwright-core');

const folder = process.argv[2];
const address = (name) => pathToFileURL(path.join(folder, name)).href;

async function open(browser, name, options) {
  const page = await browser.newPage(options);
  // Test machines are busy.
  page.setDefaultTimeout(120000);
  const complaints = [];
  page.on('console', (message) => {
    if (message.type() === 'error' || message.type() === 'warning') complaints.push(message.text());
  });
  page.on('pageerror', (error) => complaints.push(String(error)));
  page.on('dialog', (dialog) => {
    complaints.push(`a dialog: ${dialog.message()}`);
    dialog.dismiss();
  });
  page.on('request', (request) => {
    if (!/^(file|data):/.test(request.url())) complaints.push(`a request for ${request.url()}`);
  });
  const started = Date.now();
  await page.goto(address(name));
  await page.waitForSelector('html[data-ready=yes]', { state: 'attached' });
  // Wait until the first frame is painted.
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  return { page, complaints, seconds: (Date.now() - started) / 1000 };
}

/** The details shown when the pointer is on an item. */
async function pointAt(page, type, index) {
  await page.evaluate(([t, i]) => {
    const place = quadriga.place(t, i);
    document.querySelectorAll('canvas')[place.chart].scrollIntoView({ block: 'center' });
  }, [type, index]);
  const place = await page.evaluate(([t, i]) => quadriga.place(t, i), [type, index]);
  await page.mouse.move(place.x, place.y);
  await page.waitForSelector('#details:not([hidden])');
  return page.innerText('#details');
}

async function checkModel(browser) {
  const plan = JSON.parse(fs.readFileSync(path.join(folder, 'plan.json'), 'utf8'));
  const { page, complaints } = await open(browser, 'plan.html', { viewport: { width: 1400, height: 1000 }, colorScheme: 'light' });
  const counts = await page.evaluate(() => quadriga.counts());
  assert.deepEqual(counts, {
    rectangles: plan.storages.length, blocks: plan.splits.length, copies: plan.copies.length, nodes: plan.nodes.length,
  });
  // The table has a row per device.
  assert.equal(await page.locator('#table tbody tr').count(), plan.backends.length);
  const summary = await page.innerText('#sentences');
  plan.backends.forEach((backend) => assert.ok(summary.includes(`The compute buffer of ${backend.backend}`), summary));
  assert.match(summary, /Each run copies/);

  // Pointing: a split, a copy, the largest result, the largest weight.
  for (const [index, split] of plan.splits.entries()) {
    const text = await pointAt(page, 'split', index);
    assert.ok(text.includes(`split ${index} on ${plan.backends[split.backend].backend}`), text);
    assert.ok(text.includes(`${split.node_count}, steps ${split.first} to ${split.last}`), text);
  }
  assert.match(await pointAt(page, 'arrow', 0), /^(copy of|\d+ copies,) .* from .* to /);
  const largest = (usage) => plan.storages
    .map((storage, index) => ({ ...storage, index }))
    .filter((storage) => storage.usage === usage)
    .reduce((best, storage) => (storage.bytes * (storage.end - storage.start) > best.bytes * (best.end - best.start) ? storage : best));
  for (const usage of ['compute', 'weight', 'state', 'copy']) {
    const storage = largest(usage);
    const text = await pointAt(page, 'storage', storage.index);
    assert.ok(text.startsWith(storage.name), `${storage.name}: ${text}`);
    assert.ok(text.includes(storage.bytes.toLocaleString('en')), text);
    assert.ok(text.includes(storage.shape.join(' × ')) && text.includes(storage.dtype), text);
    assert.ok(text.includes(storage.why), text);
  }

  // A search highlights and lists matches; clearing it shows all again.
  await page.fill('#search', 'blk.7. mul_mat');
  const matching = plan.nodes.filter((node) => `${node.name} ${node.operation}`.includes('blk.7.') && node.operation === 'mul_mat');
  await page.waitForFunction(() => document.getElementById('found').textContent !== '');
  assert.match(await page.innerText('#found'), new RegExp(`^${matching.length} of ${plan.nodes.length} operations`));
  assert.equal(await page.locator('#results button').count(), matching.length);
  const lit = await page.evaluate(() => quadriga.view().matches);
  assert.equal(lit, new Set(matching.map((node) => node.storage)).size);
  await page.keyboard.press('ArrowDown');
  await page.keyboard.press('Enter');
  await page.waitForSelector('#details.pinned');
  assert.ok((await page.innerText('#details')).includes(matching[0].name));
  assert.ok((await page.innerText('#details')).includes(matching[0].why));
  await page.keyboard.press('Escape');
  await page.waitForSelector('#details', { state: 'hidden' });
  await page.fill('#search', '');
  await page.waitForFunction(() => quadriga.view().matches === null);
  await page.keyboard.press('Escape');
  await page.keyboard.press('Escape');

  // Keyboard only: focus a chart, move between items, open and close details.
  await page.locator('canvas').first().focus();
  await page.keyboard.press('ArrowRight');
  assert.equal((await page.evaluate(() => quadriga.view().selected)).type, 'split');
  await page.keyboard.press('Enter');
  await page.waitForSelector('#details.pinned');
  assert.match(await page.innerText('#details'), /split 0 on/);
  assert.match(await page.evaluate(() => document.getElementById('spoken').textContent), /split 0 on/);
  await page.keyboard.press('Escape');
  await page.waitForSelector('#details', { state: 'hidden' });
  const before = await page.evaluate(() => quadriga.view());
  await page.keyboard.press('+');
  const zoomed = await page.evaluate(() => quadriga.view());
  assert.ok(zoomed.to - zoomed.from < (before.to - before.from) * 0.6);
  await page.keyboard.press('0');

  // Dragging zooms into a part of the run.
  const map = page.locator('canvas').nth(2);
  await map.scrollIntoViewIfNeeded();
  const box = await map.boundingBox();
  await page.mouse.move(box.x + box.width * 0.3, box.y + 60);
  await page.mouse.down();
  await page.mouse.move(box.x + box.width * 0.5, box.y + 70, { steps: 4 });
  await page.mouse.up();
  const part = await page.evaluate(() => quadriga.view());
  assert.ok(part.from > 0 && part.to < plan.steps && part.to - part.from < plan.steps / 3, JSON.stringify(part));
  await map.dblclick();
  const whole = await page.evaluate(() => quadriga.view());
  assert.equal(whole.from, 0);
  await page.mouse.move(2, 2);
  await page.keyboard.press('Escape');
  await page.keyboard.press('Escape');

  assert.deepEqual(complaints, []);
  await page.close();
  for (const width of [1400, 400]) {
    for (const colorScheme of ['light', 'dark']) {
      const shown = await open(browser, 'plan.html', { viewport: { width, height: 1000 }, colorScheme });
      // No horizontal overflow.
      const overflow = await shown.page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
      assert.ok(overflow <= 0, `${width} px: ${overflow} px too wide`);
      await shown.page.screenshot({ path: path.join(folder, `plan-${width}-${colorScheme}.png`), fullPage: true });
      assert.deepEqual(shown.complaints, []);
      await shown.page.close();
    }
  }
}

/** Names from files are inserted as text. */
async function checkNames(browser) {
  const { page, complaints } = await open(browser, 'names.html', { viewport: { width: 900, height: 900 } });
  const name = '</script><script>alert(1)</script><!-- & "quoted" \'name\'';
  await page.fill('#search', 'quoted');
  await page.waitForSelector('#results button');
  assert.ok((await page.innerText('#results')).includes(name));
  assert.ok((await page.innerText('#title')).includes('</title><b>bold'));
  assert.equal(await page.locator('#title b').count(), 0);
  assert.deepEqual(complaints, []);
  await page.close();
}

async function checkLarge(browser) {
  const { page, complaints, seconds } = await open(browser, 'large.html', { viewport: { width: 1400, height: 1000 } });
  const counts = await page.evaluate(() => quadriga.counts());
  assert.ok(counts.nodes >= 100000, JSON.stringify(counts));
  const megabytes = await page.evaluate(() => (performance.memory ? performance.memory.usedJSHeapSize / 2 ** 20 : 0));
  await page.fill('#search', 'blk.77.');
  await page.waitForFunction(() => /of .* operations/.test(document.getElementById('found').textContent));
  const drawn = await page.evaluate(async () => {
    const started = performance.now();
    charts.forEach((chart) => chart.draw());
    return performance.now() - started;
  });
  await page.screenshot({ path: path.join(folder, 'large.png') });
  assert.deepEqual(complaints, []);
  const size = fs.statSync(path.join(folder, 'large.html')).size / 2 ** 20;
  console.log(`${counts.nodes} nodes, ${counts.rectangles} rectangles: ${size.toFixed(1)} MiB, opens in ${seconds.toFixed(2)} s, `
    + `${megabytes.toFixed(0)} MiB of script memory, redrawn in ${drawn.toFixed(0)} ms`);
  await page.close();
}

(async () => {
  const browser = await chromium.launch({
    executablePath: process.env.QUADRIGA_BROWSER,
    args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--enable-precise-memory-info'],
  });
  try {
    await checkModel(browser);
    await checkNames(browser);
    await checkLarge(browser);
  } finally {
    await browser.close();
  }
  console.log('ok');
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
