// Server-sent events of a response body.

/** Yields the data of each event; comments and other fields are skipped. */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = '';
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      const text = done ? `${decoder.decode()}\n\n` : decoder.decode(value, { stream: true });
      const lines = text.split('\n');
      lines[0] = rest + lines[0];
      rest = lines.pop();
      for (const source of lines) {
        const line = source.endsWith('\r') ? source.slice(0, -1) : source;
        if (line === '') {
          if (data.length > 0) yield data.join('\n');
          data = [];
        } else if (line.startsWith('data:')) {
          data.push(line.slice(line[5] === ' ' ? 6 : 5));
        }
      }
      if (done) return;
    }
  } finally {
    // Ends the request when the consumer stops early.
    reader.cancel().catch(() => {});
  }
}
