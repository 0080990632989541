// Words and signs of programming languages, for highlighting.

const words = (text) => new Set(text.split(' '));
const C_COMMENTS = { line: ['//'], block: [['/*', '*/']] };
const C_WORDS =
  'auto break case const continue default do else enum extern for goto if inline register return sizeof static struct switch typedef union volatile while';
const C_TYPES =
  'bool char double float int int8_t int16_t int32_t int64_t long short signed size_t uint8_t uint16_t uint32_t uint64_t unsigned void NULL true false';

const javascript = {
  ...C_COMMENTS,
  strings: ['"', "'"],
  multiline: [['`', '`']],
  keywords: words(
    'as async await break case catch class const continue debugger default delete do else export extends finally for from function get if import in instanceof interface let new of return set static super switch this throw try type typeof var void while with yield enum implements private protected public readonly declare namespace abstract keyof satisfies',
  ),
  types: words(
    'true false null undefined NaN Infinity string number boolean any unknown never object Array Map Set Promise Object String Number Boolean Date RegExp Error JSON Math console',
  ),
};
const python = {
  line: ['#'],
  strings: ['"', "'"],
  multiline: [
    ['"""', '"""'],
    ["'''", "'''"],
  ],
  meta: /@[\w.]+/y,
  keywords: words(
    'and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield',
  ),
  types: words(
    'True False None self cls int float str bool bytes list dict set tuple object range len print super type open enumerate zip isinstance Exception ValueError TypeError',
  ),
};
const rust = {
  ...C_COMMENTS,
  multiline: [['"', '"']],
  character: /b?'(?:[^'\\\n]|\\.[^'\n]{0,8})'/y,
  meta: /#!?\[[^\]]*\]|'[a-z_]\w*\b(?!')|\b[a-z_]\w*!(?!=)/y,
  keywords: words(
    'as async await break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut pub ref return static struct super trait type unsafe use where while',
  ),
  types: words(
    'self Self true false bool char f32 f64 i8 i16 i32 i64 i128 isize u8 u16 u32 u64 u128 usize str String Vec Option Some None Result Ok Err Box Rc Arc HashMap',
  ),
};
const c = {
  ...C_COMMENTS,
  strings: ['"', "'"],
  meta: /#\s*(?:include|define|undef|if|ifdef|ifndef|elif|else|endif|pragma|error)\b/y,
  keywords: words(`${C_WORDS} restrict _Static_assert`),
  types: words(C_TYPES),
};
const cpp = {
  ...c,
  keywords: words(
    `${C_WORDS} alignas and asm catch class concept const_cast consteval constexpr co_await co_return co_yield decltype delete dynamic_cast explicit export final friend mutable namespace new noexcept operator or override private protected public reinterpret_cast requires static_assert static_cast template this throw try typeid typename using virtual __global__ __device__ __shared__ __host__`,
  ),
  types: words(`${C_TYPES} nullptr std string vector map set unique_ptr shared_ptr optional wchar_t`),
};
const java = {
  ...C_COMMENTS,
  strings: ['"', "'"],
  multiline: [['"""', '"""']],
  meta: /@\w+/y,
  keywords: words(
    'abstract as assert break case catch class const continue data default do else enum extends final finally for fun if implements import in instanceof interface internal is lateinit native new object open operator override package private protected public record return sealed static super suspend switch synchronized this throw throws transient try typealias val var volatile when where while yield',
  ),
  types: words(
    'boolean byte char double float int long short void true false null String Integer List Map Set Object Boolean Long Double Int Unit Any',
  ),
};
const csharp = {
  ...C_COMMENTS,
  strings: ['"', "'"],
  multiline: [
    ['@"', '"'],
    ['"""', '"""'],
  ],
  keywords: words(
    'abstract as async await base break case catch checked class const continue default delegate do else enum event explicit extern finally fixed for foreach get goto if implicit in init interface internal is lock namespace new operator out override params partial private protected public readonly record ref return sealed set sizeof static struct switch this throw try typeof unchecked unsafe using var virtual where while yield',
  ),
  types: words(
    'bool byte char decimal double float int long object sbyte short string uint ulong ushort void true false null Task List Dictionary Console',
  ),
};
const go = {
  ...C_COMMENTS,
  strings: ['"', "'"],
  multiline: [['`', '`']],
  keywords: words(
    'break case chan const continue default defer else fallthrough for func go goto if import interface map package range return select struct switch type var',
  ),
  types: words(
    'any bool byte complex64 complex128 error float32 float64 int int8 int16 int32 int64 rune string uint uint8 uint16 uint32 uint64 uintptr true false nil iota append cap close copy len make new panic print println recover',
  ),
};
const swift = {
  ...C_COMMENTS,
  strings: ['"'],
  multiline: [['"""', '"""']],
  meta: /[@#]\w+/y,
  keywords: words(
    'actor as async await break case catch class continue default defer do else enum extension fallthrough fileprivate for func guard if import in init inout internal is let mutating open operator override private protocol public repeat return self static struct subscript super switch throw throws try typealias var where while',
  ),
  types: words('Any Array Bool Character Dictionary Double Error Float Int Optional Self Set String Void true false nil'),
};
const shell = {
  line: ['#'],
  strings: [],
  multiline: [
    ['"', '"'],
    ["'", "'"],
  ],
  meta: /\$(?:\w+|\{[^}\n]*\}|[@#?*$!-])|(?<=\s)--?[a-zA-Z][\w-]*/y,
  keywords: words(
    'case do done elif else esac export fi for function if in local readonly return select set shift source then trap unset until while',
  ),
  types: words(
    'alias apt awk cargo cat cd chmod chown cp curl cut docker echo eval exec exit find git grep head kill ls make mkdir mv node npm npx pip printf pwd python python3 read rm sed sleep sort ssh sudo tail tar tee test touch tr true false uniq wc wget which xargs',
  ),
};
const sql = {
  line: ['--'],
  block: [['/*', '*/']],
  strings: ["'", '"'],
  ignoreCase: true,
  keywords: words(
    'add all alter and any as asc begin between by case check column commit constraint create cross database default delete desc distinct drop else end exists foreign from full group having if in index inner insert into is join key left like limit not null offset on or order outer primary references replace returning right rollback select set table then transaction union unique update using values view when where with',
  ),
  types: words(
    'bigint boolean char count date decimal double float int integer json max min avg sum numeric real serial smallint text time timestamp uuid varchar coalesce now true false',
  ),
};
const ruby = {
  line: ['#'],
  strings: ['"', "'"],
  meta: /[@$:]\w+/y,
  keywords: words(
    'alias and begin break case class def do else elsif end ensure extend for if in include module next not or private protected public raise redo require rescue retry return super then undef unless until when while yield',
  ),
  types: words('true false nil self puts print attr_reader attr_writer attr_accessor Array Hash String Integer Float'),
};
const php = {
  line: ['//', '#'],
  block: [['/*', '*/']],
  strings: ['"', "'"],
  meta: /\$\w+|<\?php|\?>/y,
  keywords: words(
    'abstract and as break case catch class clone const continue declare default do echo else elseif enum extends final finally fn for foreach function global if implements include instanceof interface match namespace new or private protected public readonly require return static switch throw trait try use var while yield',
  ),
  types: words('array bool float int mixed null object string void true false self parent'),
};
const lua = {
  line: ['--'],
  block: [['--[[', ']]']],
  strings: ['"', "'"],
  multiline: [['[[', ']]']],
  keywords: words('and break do else elseif end for function goto if in local not or repeat return then until while'),
  types: words('true false nil self print pairs ipairs require table string math type tostring tonumber'),
};
const json = { strings: ['"'], key: /"(?:[^"\\\n]|\\.)*"(?=\s*:)/y, keywords: words('true false null'), types: new Set() };
const yaml = {
  line: ['#'],
  strings: ['"', "'"],
  key: /[\w.\-/]+(?=:(?:\s|$))/y,
  meta: /[&*!]\w+|^---|\$\{\{[^}\n]*\}\}/y,
  keywords: words('true false null yes no on off'),
  types: new Set(),
};
const toml = {
  line: ['#', ';'],
  strings: ['"', "'"],
  multiline: [
    ['"""', '"""'],
    ["'''", "'''"],
  ],
  key: /[\w.-]+(?=\s*=)/y,
  meta: /^\s*\[\[?[^\]\n]*\]\]?/y,
  keywords: words('true false'),
  types: new Set(),
};
const css = {
  block: [['/*', '*/']],
  strings: ['"', "'"],
  key: /--[\w-]+|[a-z-]+(?=\s*:\s)/y,
  meta: /@[\w-]+|[.#][a-zA-Z_][\w-]*|::?[a-z-]+/y,
  keywords: words('important inherit initial none auto var calc'),
  types: words('a body div span p ul li h1 h2 h3 html main header footer nav section button input img table'),
};
const markup = { markup: true };
const diff = { diff: true };
const dockerfile = {
  ...shell,
  ignoreCase: false,
  keywords: words('FROM RUN CMD LABEL EXPOSE ENV ADD COPY ENTRYPOINT VOLUME USER WORKDIR ARG ONBUILD HEALTHCHECK SHELL AS'),
};
const makefile = { ...shell, key: /^[\w./%-]+(?=\s*:)/y };

/** The definitions by the names that code blocks use. */
export const languages = {
  javascript,
  js: javascript,
  jsx: javascript,
  mjs: javascript,
  typescript: javascript,
  ts: javascript,
  tsx: javascript,
  python,
  py: python,
  python3: python,
  rust,
  rs: rust,
  c,
  h: c,
  cpp,
  'c++': cpp,
  cc: cpp,
  hpp: cpp,
  cuda: cpp,
  cu: cpp,
  java,
  kotlin: java,
  kt: java,
  scala: java,
  csharp,
  cs: csharp,
  'c#': csharp,
  go,
  golang: go,
  swift,
  bash: shell,
  sh: shell,
  shell,
  zsh: shell,
  console: shell,
  sql,
  sqlite: sql,
  postgresql: sql,
  mysql: sql,
  ruby,
  rb: ruby,
  php,
  lua,
  json,
  jsonc: { ...json, ...C_COMMENTS },
  json5: json,
  jsonl: json,
  yaml,
  yml: yaml,
  toml,
  ini: toml,
  conf: toml,
  css,
  scss: css,
  less: css,
  html: markup,
  xml: markup,
  svg: markup,
  vue: markup,
  diff,
  patch: diff,
  dockerfile,
  docker: dockerfile,
  makefile,
  make: makefile,
};
