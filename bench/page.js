'use strict';
// How long pages of large plans take to open: `scripts/browser bench/page.js FILE.html [ROUNDS]`; see bench/page.
const { pathToFileURL } = require('node:url');
const { chromium } = require('playwright-core');

const [file, rounds = '5'] = process.argv.slice(2);
(async () => {
  const results = [];
  for (let round = 0; round < Number(rounds); round += 1) {
    const browser = await chromium.launch({
      executablePath: process.env.QUADRIGA_BROWSER,
      args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--enable-precise-memory-info'],
    });
    const page = await browser.newPage({ viewport: { width: 1400, height: 1000 } });
    const started = Date.now();
    await page.goto(pathToFileURL(file).href);
    await page.waitForSelector('html[data-ready=yes]', { state: 'attached' });
    await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
    const seconds = (Date.now() - started) / 1000;
    const session = await page.context().newCDPSession(page);
    await session.send('HeapProfiler.collectGarbage');
    const more = await page.evaluate(() => {
      const drawing = performance.now();
      charts.forEach((chart) => chart.draw());
      return { drawing: performance.now() - drawing, heap: performance.memory.usedJSHeapSize / 2 ** 20, ...quadriga.counts() };
    });
    results.push({ seconds, ...more });
    await browser.close();
  }
  results.sort((a, b) => a.seconds - b.seconds);
  const { nodes, rectangles, blocks, heap, drawing, seconds } = results[Math.floor(results.length / 2)];
  console.log(`${nodes} nodes, ${rectangles} rectangles, ${blocks} splits: opens in ${seconds.toFixed(2)} s (median of ${rounds}), `
    + `${heap.toFixed(0)} MiB of script memory, drawn again in ${drawing.toFixed(0)} ms`);
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
