// Markdown of answers: its structure, hostile content, and the cost of long answers.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { answered, ask, open } from './browser.mjs';

/** The outline of a text, drawn whole or piece by piece: `tag(children)` and quoted text. */
async function outline(page, source, pieces = null) {
  return (await outlines(page, [[source, pieces]]))[0];
}

function outlines(page, sources) {
  return page.evaluate(async (list) => {
    const { Markdown } = await import('./markdown.js');
    const skip = (node) => node.nodeName === 'FIGCAPTION';
    const describe = (node) => {
      if (node.nodeType === Node.TEXT_NODE) return JSON.stringify(node.data);
      const inside = Array.from(node.childNodes)
        .filter((child) => !skip(child))
        .map(describe)
        .join(' ');
      const name = node.nodeName.toLowerCase() + (node.href ? `[${node.getAttribute('href')}]` : '');
      return inside ? `${name}(${inside})` : name;
    };
    return list.map(([text, parts]) => {
      const target = document.createElement('div');
      const markdown = new Markdown(target);
      for (const part of parts ?? [text]) {
        markdown.append(part);
        if (parts) markdown.draw();
      }
      markdown.finish();
      target.normalize();
      return Array.from(target.childNodes, describe).join(' ');
    });
  }, sources);
}

const cases = [
  ['paragraphs and breaks', 'a\nb\n\nc', 'p("a" br "b") p("c")'],
  ['headings', '# A\n## B ##\nC\n===\n', 'h3("A") h4("B") h3("C")'],
  [
    'emphasis',
    '*a* **b** ***c*** _d_ __e__ ~~f~~',
    'p(em("a") " " strong("b") " " em(strong("c")) " " em("d") " " strong("e") " " del("f"))',
  ],
  ['no emphasis', 'snake_case_name 2 * 3 * 4 \\*x\\*', 'p("snake_case_name 2 * 3 * 4 *x*")'],
  ['emphasis around punctuation', '**Note:** x **"q"**, y', 'p(strong("Note:") " x " strong("\\"q\\"") ", y")'],
  ['emphasis in Chinese', '这是**强调。**后面', 'p("这是" strong("强调。") "后面")'],
  ['code', 'a `b*c*` ``d`e``', 'p("a " code("b*c*") " " code("d`e"))'],
  ['nested list', '- a\n  - b\n    - c\n- d', 'ul(li(p("a") ul(li(p("b") ul(li(p("c")))))) li(p("d")))'],
  ['ordered list with two spaces', '1. a\n  - b\n2. c', 'ol(li(p("a") ul(li(p("b")))) li(p("c")))'],
  [
    'list with paragraphs and code',
    '1. a\n\n   b\n   ```\n   x\n   ```\n2. c',
    'ol(li(p("a") p("b") figure(pre(code("x\\n")))) li(p("c")))',
  ],
  ['list after text', 'Text:\n- a\n- b\n\nAfter', 'p("Text:") ul(li(p("a")) li(p("b"))) p("After")'],
  ['numbers in text start no list', 'It was\n1986. A year', 'p("It was" br "1986. A year")'],
  ['quote', '> a\n> > b\n\nc', 'blockquote(p("a") blockquote(p("b"))) p("c")'],
  [
    'fence',
    '```py\ndef f():\n\n  pass\n```\nend',
    'figure(pre(code(span("def") " " span("f") "():\\n\\n  " span("pass") "\\n"))) p("end")',
  ],
  ['open fence', '```\na\nb', 'figure(pre(code("a\\nb\\n")))'],
  ['fence in a fence', '````\n```\nx\n```\n````', 'figure(pre(code("```\\nx\\n```\\n")))'],
  [
    'table',
    'a | b\n--|:-:\n`x|y` | **2**\n3',
    'div(table(thead(tr(th("a") th("b"))) tbody(tr(td(code("x|y")) td(strong("2"))) tr(td("3") td))))',
  ],
  ['rule', 'a\n\n---\n\n* * *', 'p("a") hr hr'],
  [
    'links',
    '[a *b*](https://x.test/?q=1_2_3 "t") <https://y.test> https://z.test/a_b_(c).',
    'p(a[https://x.test/?q=1_2_3]("a " em("b")) " " a[https://y.test/]("https://y.test") " " a[https://z.test/a_b_(c)]("https://z.test/a_b_(c)") ".")',
  ],
  ['images are links', '![cat](https://x.test/c.png)', 'p(a[https://x.test/c.png]("cat"))'],
  ['entities', '&lt;b&gt; &amp;amp; &#65; &nope;', 'p("<b> &amp; A &nope;")'],
  [
    'formulas stay',
    'so \\(a_1 * b_2 * c\\) and $$x_{1}*y*$$',
    'p("so " span("\\\\(a_1 * b_2 * c\\\\)") " and " span("$$x_{1}*y*$$"))',
  ],
  ['tasks', '- [x] a\n- [ ] b', 'ul(li(p("a")) li(p("b")))'],
  ['HTML is text', '<b>x</b> <script>y</script>', 'p("<b>x</b> <script>y</script>")'],
  ['brackets', '[a] [b](c) ](d) [e](javascript:f)', 'p("[a] " span("b") " ](d) " span("e"))'],
];

test('markdown becomes elements, whole or in pieces of any size', async (t) => {
  const { page } = await open(t);
  const pieces = (source, size) =>
    Array.from({ length: Math.ceil(source.length / size) }, (_, at) => source.slice(at * size, (at + 1) * size));
  for (const size of [null, 1, 3, 7]) {
    const found = await outlines(
      page,
      cases.map(([, source]) => [source, size && pieces(source, size)]),
    );
    cases.forEach(([name, , expected], at) => assert.equal(found[at], expected, `${name}, in pieces of ${size}`));
  }
});

test('random markdown is the same in pieces as whole', async (t) => {
  const { page } = await open(t);
  const seed = Number(process.env.SEED ?? Date.now() % 1_000_000);
  t.diagnostic(`SEED=${seed}`);
  let state = seed;
  const random = (below) => {
    state = (state * 1103515245 + 12345) % 2 ** 31;
    return Math.floor((state / 2 ** 31) * below);
  };
  const atoms = [
    'a',
    'word ',
    '\n',
    '\n\n',
    '- ',
    '1. ',
    '> ',
    '  ',
    '    ',
    '```\n',
    '```js\n',
    '`',
    '*',
    '**',
    '_',
    '~~',
    '|',
    '--|--\n',
    '# ',
    '---\n',
    '[x](',
    'https://a.test',
    ')',
    '](',
    '<',
    '&lt;',
    '\\',
    '$$',
    '\t',
    '===\n',
    '- [ ] ',
  ];
  const texts = Array.from({ length: 1500 }, () => Array.from({ length: 5 + random(40) }, () => atoms[random(atoms.length)]));
  const whole = await outlines(
    page,
    texts.map((parts) => [parts.join(''), null]),
  );
  const grown = await outlines(
    page,
    texts.map((parts) => [parts.join(''), parts]),
  );
  texts.forEach((parts, at) => assert.equal(grown[at], whole[at], JSON.stringify(parts.join(''))));
});

const HOSTILE = [
  '<img src=x onerror="alert(1)"><script>alert(2)</script><svg onload=alert(3)>',
  '[a](javascript:alert(4)) [b](JaVaScRiPt:alert(5)) [c](java\tscript:alert(6)) [d](data:text/html,<script>alert(7)</script>) [e](vbscript:x)',
  '<javascript:alert(8)> ![f](javascript:alert(9)) [g](&#106;avascript:alert(10))',
  '```"><img src=x onerror=alert(11)>\n</code></pre><script>alert(12)</script>\n```',
  '```html\n<script>alert(13)</script><a href="javascript:alert(14)">x</a>\n```',
  '| <img src=x onerror=alert(15)> | [h](javascript:alert(16)) |\n|---|---|\n| <iframe src="https://evil.test"></iframe> | ![i](https://evil.test/p.png) |',
  '<style>body{display:none}</style><base href="https://evil.test/"><meta http-equiv="refresh" content="0;url=https://evil.test">',
].join('\n\n');

test('hostile answers stay text', async (t) => {
  const { page, mock } = await open(t);
  mock.models = ['<img src=x onerror=alert(17)>'];
  mock.status.requests[0].id = '<img src=x onerror=alert(18)>';
  await page.reload();
  await page.waitForSelector('html[data-ready]', { state: 'attached' });
  mock.answer = (reply) => {
    reply.thought(HOSTILE);
    for (const piece of HOSTILE.match(/[\s\S]{1,9}/g)) reply.content(piece);
    reply.done();
  };
  await ask(page, HOSTILE);
  await page.click('.thinking summary');
  const found = await page.evaluate(() => ({
    tags: Array.from(document.querySelectorAll('#messages *'), (element) => element.nodeName.toLowerCase()).filter((name) =>
      ['img', 'script', 'iframe', 'style', 'base', 'meta', 'object'].includes(name),
    ),
    handlers: Array.from(document.querySelectorAll('#messages *')).filter((element) =>
      element.getAttributeNames().some((name) => name.startsWith('on') || name === 'style'),
    ).length,
    links: Array.from(document.querySelectorAll('#messages a'), (link) => `${link.protocol} ${link.rel}`),
  }));
  assert.deepEqual(found.tags, []);
  assert.equal(found.handlers, 0);
  for (const link of found.links) assert.match(link, /^https?: noopener/);
  assert.match(await page.innerText('.message.assistant > .markdown'), /<img src=x onerror="alert\(1\)">/);
  await page.click('#server-tab');
  await page.waitForSelector('#status-requests th:has-text("<img")');
  await page.click('#chat-tab');
  // A title comes from the message.
  assert.match(await page.innerText('.item .open'), /<img/);
});

test('code has colours and a copy button', async (t) => {
  const { page, mock, context } = await open(t);
  await context.grantPermissions(['clipboard-read', 'clipboard-write']);
  const code = 'fn main() {\n    /* a\n       comment */ let s = "x // y"; // end\n    println!("{s}");\n}';
  mock.answer = (reply) => {
    reply.content(`\`\`\`rust\n${code}\n\`\`\``);
    reply.done();
  };
  await ask(page, 'code');
  const kinds = await page
    .locator('.code code span')
    .evaluateAll((spans) => spans.map((span) => `${span.className.slice(5)}:${span.textContent}`));
  for (const expected of [
    'keyword:fn',
    'function:main',
    'comment:/* a',
    'comment:       comment */',
    'string:"x // y"',
    'comment:// end',
    'meta:println!',
  ]) {
    assert.ok(kinds.includes(expected), `${expected} in ${kinds}`);
  }
  await page.click('.code button');
  await page.waitForFunction(() => document.querySelector('#announcements').textContent === 'Copied');
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), code);
  // Without the clipboard API, as on plain HTTP from another machine.
  await page.evaluate(() => Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true }));
  await page.hover('.message.user');
  await page.click('.message.user .actions button[aria-label="Copy message"]');
  await page.focus('#input');
  await page.keyboard.press('Control+v');
  assert.equal(await page.inputValue('#input'), 'code');
  await page.evaluate(() => delete navigator.clipboard);
  await page.click('.message.assistant .actions button[aria-label="Copy answer"]');
  await page.waitForFunction(async () => (await navigator.clipboard.readText()).startsWith('```rust'));
});

test('every language colours without losing a character', async (t) => {
  const { page } = await open(t);
  const wrong = await page.evaluate(async () => {
    const { languages } = await import('./languages.js');
    const { Highlighter } = await import('./highlight.js');
    const source =
      'a = "s\\"t" + \'c\' # x\n// y /* z\n*/ <b c="d">&amp;</b> `t\nu` @m $v ${w} --flag 0x1F 1.5e3 é漢 "open\n<!-- c\n--> [[x]] #[y] \'a: f(1) r"""q\n"""';
    const lose = (name) => {
      const highlighter = new Highlighter(name);
      return source.split('\n').some(
        (line) =>
          highlighter
            .line(line)
            .map((node) => node.textContent ?? node)
            .join('') !== line,
      );
    };
    return Object.keys(languages).filter(lose);
  });
  assert.deepEqual(wrong, []);
});

test('drawing a long answer touches each line once', async (t) => {
  const { page, mock } = await open(t);
  // 200 kB of each kind of block that can grow long.
  const kinds = {
    paragraphs: 'Some words with *emphasis* and `code` in a paragraph.\n\n'.repeat(3600),
    code: `\`\`\`js\n${'const value = compute(1, "two"); // three\n'.repeat(4600)}`,
    list: '- an item with **strong** text\n'.repeat(6400),
    table: `a|b\n-|-\n${'one cell | another cell\n'.repeat(8000)}`,
  };
  const counts = await page.evaluate(async (sources) => {
    const { Markdown } = await import('./markdown.js');
    // Counts the elements that are created in all while the text grows in 400 steps.
    const create = document.createElement.bind(document);
    let created = 0;
    document.createElement = (name) => {
      created += 1;
      return create(name);
    };
    const result = {};
    for (const [kind, source] of Object.entries(sources)) {
      const target = create('div');
      const markdown = new Markdown(target);
      created = 0;
      const step = Math.ceil(source.length / 400);
      for (let at = 0; at < source.length; at += step) {
        markdown.append(source.slice(at, at + step));
        markdown.draw();
      }
      markdown.finish();
      result[kind] = { created, final: target.querySelectorAll('*').length };
    }
    document.createElement = create;
    return result;
  }, kinds);
  for (const [kind, { created, final }] of Object.entries(counts)) {
    assert.ok(final > 5000 && created < 1.5 * final + 5000, `${kind}: ${created} elements created for ${final}`);
  }
  // The same through the whole page.
  mock.answer = (reply) => {
    for (const piece of kinds.paragraphs.match(/[\s\S]{1,200}/g)) reply.content(piece);
    reply.done();
  };
  await page.fill('#input', 'long');
  await page.press('#input', 'Enter');
  await answered(page);
  assert.equal(await page.locator('.message.assistant > .markdown > p').count(), 3600);
});

test('hostile sizes end soon', async (t) => {
  const { page } = await open(t);
  const size = 20_000;
  const sources = [
    '['.repeat(size),
    '`'.repeat(size),
    '*a '.repeat(size),
    '**a'.repeat(size),
    '_a*'.repeat(size),
    '> '.repeat(size),
    '- '.repeat(size),
    '[a]('.repeat(size),
    '![]('.repeat(size),
    '`a``b'.repeat(size),
    '\\('.repeat(size),
    '<http://'.repeat(size),
    '|'.repeat(size),
    '~a~~b'.repeat(size),
    'http://'.repeat(size),
    '#'.repeat(size),
    `a\n${'-|'.repeat(size)}`,
    `${'1. '.repeat(size)}x`,
  ];
  for (const source of sources) await outline(page, source);
});
