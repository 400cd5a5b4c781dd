// Our declarations of libibverbs against its own header.
#include <infiniband/verbs.h>

#include "check.hpp"
#include "holmes/transport/rdma/abi.hpp"
#include "same_layout.hpp"

namespace ours = holmes::verbs;

#define SAME_SIZE(own, theirs) static_assert(sizeof(ours::own) == sizeof(theirs), #theirs)
#define SAME(own, field, theirs, their_field) SAME_MEMBER(ours::own, field, theirs, their_field)
#define EQUAL(own, theirs) static_assert(static_cast<long>(ours::own) == static_cast<long>(theirs), #theirs)

SAME_SIZE(Gid, ibv_gid);
SAME_SIZE(PortAttributes, ibv_port_attr);
SAME(PortAttributes, state, ibv_port_attr, state);
SAME(PortAttributes, active_mtu, ibv_port_attr, active_mtu);
SAME(PortAttributes, gid_count, ibv_port_attr, gid_tbl_len);
SAME(PortAttributes, pkey_count, ibv_port_attr, pkey_tbl_len);
SAME(PortAttributes, lid, ibv_port_attr, lid);
SAME(PortAttributes, link_layer, ibv_port_attr, link_layer);
SAME_SIZE(MemoryRegion, ibv_mr);
SAME(MemoryRegion, local_key, ibv_mr, lkey);
SAME(MemoryRegion, remote_key, ibv_mr, rkey);
SAME_SIZE(CompletionChannel, ibv_comp_channel);
SAME(CompletionChannel, fd, ibv_comp_channel, fd);
SAME_SIZE(WorkCompletion, ibv_wc);
SAME(WorkCompletion, id, ibv_wc, wr_id);
SAME(WorkCompletion, status, ibv_wc, status);
SAME(WorkCompletion, bytes, ibv_wc, byte_len);
SAME(WorkCompletion, immediate, ibv_wc, imm_data);
SAME(WorkCompletion, flags, ibv_wc, wc_flags);
SAME_SIZE(AsyncEvent, ibv_async_event);
SAME(AsyncEvent, of.pair, ibv_async_event, element.qp);
SAME(AsyncEvent, of.port, ibv_async_event, element.port_num);
SAME(AsyncEvent, type, ibv_async_event, event_type);
SAME_SIZE(ScatterEntry, ibv_sge);
SAME(ScatterEntry, local_key, ibv_sge, lkey);
SAME_SIZE(SendRequest, ibv_send_wr);
SAME(SendRequest, entries, ibv_send_wr, sg_list);
SAME(SendRequest, entry_count, ibv_send_wr, num_sge);
SAME(SendRequest, opcode, ibv_send_wr, opcode);
SAME(SendRequest, flags, ibv_send_wr, send_flags);
SAME(SendRequest, immediate, ibv_send_wr, imm_data);
SAME(SendRequest, remote_address, ibv_send_wr, wr.rdma.remote_addr);
SAME(SendRequest, remote_key, ibv_send_wr, wr.rdma.rkey);
SAME_SIZE(ReceiveRequest, ibv_recv_wr);
SAME(ReceiveRequest, entry_count, ibv_recv_wr, num_sge);
SAME_SIZE(QpCapacity, ibv_qp_cap);
SAME(QpCapacity, inline_bytes, ibv_qp_cap, max_inline_data);
SAME_SIZE(QpSetup, ibv_qp_init_attr);
SAME(QpSetup, capacity, ibv_qp_init_attr, cap);
SAME(QpSetup, type, ibv_qp_init_attr, qp_type);
SAME(QpSetup, signals_all, ibv_qp_init_attr, sq_sig_all);
SAME_SIZE(Address, ibv_ah_attr);
SAME(Address, route.own_gid_index, ibv_ah_attr, grh.sgid_index);
SAME(Address, route.hop_limit, ibv_ah_attr, grh.hop_limit);
SAME(Address, route.traffic_class, ibv_ah_attr, grh.traffic_class);
SAME(Address, lid, ibv_ah_attr, dlid);
SAME(Address, service_level, ibv_ah_attr, sl);
SAME(Address, has_route, ibv_ah_attr, is_global);
SAME(Address, port, ibv_ah_attr, port_num);
SAME_SIZE(QpAttributes, ibv_qp_attr);
SAME(QpAttributes, path_mtu, ibv_qp_attr, path_mtu);
SAME(QpAttributes, receive_psn, ibv_qp_attr, rq_psn);
SAME(QpAttributes, send_psn, ibv_qp_attr, sq_psn);
SAME(QpAttributes, peer_qp, ibv_qp_attr, dest_qp_num);
SAME(QpAttributes, access, ibv_qp_attr, qp_access_flags);
SAME(QpAttributes, address, ibv_qp_attr, ah_attr);
SAME(QpAttributes, pkey_index, ibv_qp_attr, pkey_index);
SAME(QpAttributes, max_peer_reads, ibv_qp_attr, max_dest_rd_atomic);
SAME(QpAttributes, min_rnr_timer, ibv_qp_attr, min_rnr_timer);
SAME(QpAttributes, port, ibv_qp_attr, port_num);
SAME(QpAttributes, timeout, ibv_qp_attr, timeout);
SAME(QpAttributes, retries, ibv_qp_attr, retry_cnt);
SAME(QpAttributes, rnr_retries, ibv_qp_attr, rnr_retry);
SAME_SIZE(ContextOperations, ibv_context_ops);
SAME(ContextOperations, poll, ibv_context_ops, poll_cq);
SAME(ContextOperations, request_notification, ibv_context_ops, req_notify_cq);
SAME(ContextOperations, post_send, ibv_context_ops, post_send);
SAME(ContextOperations, post_receive, ibv_context_ops, post_recv);
SAME_SIZE(Context, ibv_context);
SAME(Context, operations, ibv_context, ops);
SAME(Context, command_fd, ibv_context, cmd_fd);
SAME(Context, async_fd, ibv_context, async_fd);
SAME(CompletionQueue, context, ibv_cq, context);
SAME(CompletionQueue, capacity, ibv_cq, cqe);
SAME(QueuePair, context, ibv_qp, context);
SAME(QueuePair, number, ibv_qp, qp_num);
SAME(QueuePair, state, ibv_qp, state);
EQUAL(port_active, IBV_PORT_ACTIVE);
EQUAL(port_down, IBV_PORT_DOWN);
EQUAL(EventType::qp_fatal, IBV_EVENT_QP_FATAL);
EQUAL(EventType::device_fatal, IBV_EVENT_DEVICE_FATAL);
EQUAL(EventType::port_active, IBV_EVENT_PORT_ACTIVE);
EQUAL(EventType::port_error, IBV_EVENT_PORT_ERR);
EQUAL(link_infiniband, IBV_LINK_LAYER_INFINIBAND);
EQUAL(link_ethernet, IBV_LINK_LAYER_ETHERNET);
EQUAL(QpState::init, IBV_QPS_INIT);
EQUAL(QpState::ready_to_receive, IBV_QPS_RTR);
EQUAL(QpState::ready_to_send, IBV_QPS_RTS);
EQUAL(QpState::error, IBV_QPS_ERR);
EQUAL(reliable_connected, IBV_QPT_RC);
EQUAL(access_local_write, IBV_ACCESS_LOCAL_WRITE);
EQUAL(access_remote_write, IBV_ACCESS_REMOTE_WRITE);
EQUAL(access_remote_read, IBV_ACCESS_REMOTE_READ);
EQUAL(Opcode::rdma_write, IBV_WR_RDMA_WRITE);
EQUAL(Opcode::rdma_write_with_immediate, IBV_WR_RDMA_WRITE_WITH_IMM);
EQUAL(Opcode::rdma_read, IBV_WR_RDMA_READ);
EQUAL(send_fence, IBV_SEND_FENCE);
EQUAL(send_signaled, IBV_SEND_SIGNALED);
EQUAL(send_solicited, IBV_SEND_SOLICITED);
EQUAL(send_inline, IBV_SEND_INLINE);
EQUAL(set_state, IBV_QP_STATE);
EQUAL(set_access, IBV_QP_ACCESS_FLAGS);
EQUAL(set_pkey_index, IBV_QP_PKEY_INDEX);
EQUAL(set_port, IBV_QP_PORT);
EQUAL(set_address, IBV_QP_AV);
EQUAL(set_path_mtu, IBV_QP_PATH_MTU);
EQUAL(set_timeout, IBV_QP_TIMEOUT);
EQUAL(set_retries, IBV_QP_RETRY_CNT);
EQUAL(set_rnr_retries, IBV_QP_RNR_RETRY);
EQUAL(set_receive_psn, IBV_QP_RQ_PSN);
EQUAL(set_max_reads, IBV_QP_MAX_QP_RD_ATOMIC);
EQUAL(set_min_rnr_timer, IBV_QP_MIN_RNR_TIMER);
EQUAL(set_send_psn, IBV_QP_SQ_PSN);
EQUAL(set_max_peer_reads, IBV_QP_MAX_DEST_RD_ATOMIC);
EQUAL(set_peer_qp, IBV_QP_DEST_QPN);
EQUAL(Status::flushed, IBV_WC_WR_FLUSH_ERR);
EQUAL(Status::remote_invalid_request, IBV_WC_REM_INV_REQ_ERR);
EQUAL(Status::remote_access, IBV_WC_REM_ACCESS_ERR);
EQUAL(Status::remote_operation, IBV_WC_REM_OP_ERR);
EQUAL(Status::retries_exceeded, IBV_WC_RETRY_EXC_ERR);
EQUAL(Status::receiver_not_ready, IBV_WC_RNR_RETRY_EXC_ERR);
EQUAL(Status::response_timeout, IBV_WC_RESP_TIMEOUT_ERR);

int main() { return holmes::test::result("verbs_abi"); }
