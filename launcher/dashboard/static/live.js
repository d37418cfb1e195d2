// What the server says of the runs: now, whenever it changes, and again after either was restarted.

export function listen(onStatus, onConnection) {
  let source = null;
  let timer = null;
  const open = () => {
    source = new EventSource("api/events");
    source.onopen = () => onConnection("live");
    source.onmessage = (event) => {
      onConnection("live");
      onStatus(JSON.parse(event.data));
    };
    source.onerror = () => {
      onConnection("lost");
      // A browser gives up for good after some errors, such as a proxy's or a server's that is starting.
      if (source.readyState === EventSource.CLOSED) {
        clearTimeout(timer);
        timer = setTimeout(open, 1500);
      }
    };
  };
  open();
  addEventListener("pagehide", () => source.close());
}
