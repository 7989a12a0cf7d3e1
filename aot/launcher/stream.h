/* A thread's stream, for frameworks that do not hand it on with their tensors. */
#ifndef KVB_STREAM_H
#define KVB_STREAM_H

/* `stream`, or, where that is NULL, the one that this thread was last told of for the device. */
__attribute__((visibility("hidden"))) void *kvb_stream_or_told(void *stream, int device_id);

#endif
